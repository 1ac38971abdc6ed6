"""`torchrun --rdzv-backend=elastic`: the rendezvous of torchrun on etcd v3. It runs in torchrun's agents, no workers.

torch's own etcd backends speak version 2 of etcd's protocol, which etcd 3.6 has no more; with the c10d backend the job
ends with the machine that holds its store. Here what the agents agree on is in etcd, of which members may fail.

    handler.py        what torch finds under the entry point `torchrun.handlers`
    state_backend.py  the state of the rendezvous: who is in which round
    agent_store.py    what the agents of one round tell each other
    run_keys.py       the keys of one run in etcd
"""
