"""What durable checkpoints are, without torch: names, manifests, which one to use, which ones to keep, where they lie.

    ROOT/<series>/<entry>/      series: `_periodic`, or the name of a job.save; entry: see naming.py
        part-00000-of-00003.safetensors   the first of three members' share of the tensors, a valid safetensors file
        part-00000-of-00003.json          what that member wrote: it says so to the others
        files/<name>                      what on_checkpoint hooks have left
        manifest.json                     written last, atomically; an entry without it is no checkpoint

`runtime/checkpoint` writes and reads the tensors.

    naming.py       names of series, entries and files
    manifest.py     what a checkpoint consists of, and the digest of everything that it says
    description.py  what a copy of the state says of itself
    layout.py       how tensors lie in the data files
    partition.py    which member writes what
    policy.py       how often a checkpoint is taken, and which stay
    select.py       which checkpoint a job goes on from, and why none of the newer ones
    pointer.py      the pointer to the newest complete one, in the store
    series.py       one series on its storage: what is there, whether it is whole, what may go
    storage.py      a directory of this machine, or any fsspec path
    settings.py     what a worker has to know about checkpoints
    export.py       a checkpoint as plain files
"""
