"""Jobs on the nodes of a Ray cluster: `elastic.ray.Trainer(train, workers=(2, 8)).fit()`.

A placement group of one bundle for each agent: Ray finds the place, asks its autoscaler for machines where there is
none, and places the bundle anew when its node is lost. In the bundle an actor, whose child is the agent.

    trainer.py         the public class: groups and actors from the start of a job to its end
    trial.py           a Trainer as a trial of Ray Tune
    agent_actor.py     the actor of a node, and Ray's word that the node is drained
    bundles.py         which groups to ask for, which actors to start. Pure
"""

from elastic.platforms.common.job_driver import JobResult
from elastic.platforms.ray.trainer import Trainer

__all__ = ["JobResult", "Trainer"]
