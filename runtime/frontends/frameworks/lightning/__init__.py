"""Lightning in place: its Trainer as it is, and loops of a script's own over what Fabric sets up.

Lightning's loops get places of batches. At the last place of a step this worker's ranks are computed by the module's
own training_step(); what they log and add to attributes is had by every worker, and Lightning steps once.

    trainer.py     adapts each Trainer and Fabric that a script makes
    strategy.py    what their loops ask for: the steps of the ranks
    evaluation.py  validate, test and predict
    parts.py       what a part logs and adds up, had on every worker
    attributes.py  plain attributes of the module, before and behind a part
    state.py       what is kept of a Trainer between steps
    refusals.py    what cannot be done in place, with what to write instead
"""
