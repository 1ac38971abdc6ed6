"""`elastic k8s`: a fleet for one job on Kubernetes. The manifest, and what its pods run.

manifest.py           all objects of a job, for `kubectl apply`. Pure
rendezvous_pods.py    those of etcd and the rendezvous. Pure
agent_pods.py         those of the agents: a Job, a JobSet or a TrainJob. Pure
pod_parts.py          what the pods have in common: paths, environment, rights. Pure
yaml_text.py          documents as YAML. Pure
entrance.py           before an agent starts: its certificates, and the job
agent_pod.py          an agent in its pod, until the job is over or has left the node
trainer_status.py     progress, for Kubeflow Trainer
probe.py              what a pod answers to its kubelet
"""
