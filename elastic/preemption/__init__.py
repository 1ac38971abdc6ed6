"""Notices that this machine is about to go: who gives them, and what its node does about them.

notice.py              what a notice is, and times in the documents of providers. Pure
provider.py            what a provider of notices has to offer
selection.py           which sources `--notices` means
aws.py                 Amazon EC2
azure.py               Azure Scheduled Events
gcp.py                 Google Compute Engine
kubernetes.py          Kubernetes: the taints of the pod's node, and the end of the pod
kubernetes_notices.py  what a Node and a Pod say. Pure
kubernetes_api.py      one object of its API server, watched
slurm.py               Slurm: a signal before the time limit
file.py                a file that appears
metadata_http.py       one question to a metadata service
watcher.py             looks at each source from a thread of its own
relay.py               passed on to the agents of the node's jobs: one asks, all leave
policy.py              what the node does: ``step(stay, event, now_s)``. Pure
"""
