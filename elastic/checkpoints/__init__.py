"""Durable checkpoints, without torch: names, manifests, storage, whether one can be used, and which are kept.
elastic/records/resume.py chooses the one from which a job goes on.

    ROOT/<series>/<entry>/      series: `_periodic`, or the name of a job.save; entry: see naming.py
        part-00000-of-00003.safetensors   the first of three members' share of the tensors, a valid safetensors file
        part-00000-of-00003.json          that member's note for the others about what it wrote
        files/<name>                      files of on_checkpoint hooks
        manifest.json                     written last, atomically; an entry without it is no checkpoint

`runtime/recovery/checkpoint` writes and reads the tensors.

    naming.py       names of series, entries and files
    manifest.py     the manifest: files of a checkpoint, where it was taken, and a digest of all that
    description.py  the description of a copy of the state
    layout.py       the layout of tensors in the data files
    partition.py    which member writes what
    policy.py       how often a checkpoint is taken, and which are kept
    select.py       whether an entry can be used, and if not, why
    pointer.py      the pointer to the newest complete checkpoint, in the store
    series.py       one series on its storage: its entries, their checks, their removal
    storage.py      a directory of this machine, or any fsspec path
    settings.py     a worker's settings of checkpoints
    export.py       a checkpoint as plain files
"""
