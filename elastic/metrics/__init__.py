"""What a process tells Prometheus: `--metrics` of `elastic run`, `elastic agent` and `elastic rendezvous`.

catalogue.py        every metric: name, type, labels, meaning. Pure
metric_registry.py  the values that are shown now
job_fold.py         a job's journals, ledger and status become values, one line after the other
time_spent.py       where a job's time went, and so its goodput; the dashboard shows it too. Pure
follower.py         follows the files of this machine's jobs, on a thread of its own
replica.py          what a replica of a fleet knows without files
option.py           `--metrics`, and what it may say
http_endpoint.py    /metrics, /healthz and /readyz, with certificates or on loopback
service.py          all of it together, for the commands

Counters begin at 0 with their process, as Prometheus expects: a resumed command is a new process. Nothing here is asked
by training, and nothing here asks a worker.
"""
