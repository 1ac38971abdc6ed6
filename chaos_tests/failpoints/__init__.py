"""Faults at a place within a worker: at a point of a step, of a copy, of a checkpoint, of a rebuild.

Which points there are, and what may happen there, says chaos_tests/scenario/failpoints.py. The product knows nothing
of it: the points are put into it when its modules are imported.

    injected.py      in each worker: looks at each point whether there is an order for it
    orders.py        in the harness: gives orders, and hears what was done
    import_patch.py  changes to a module when a process imports it
    site/            put on the path of a job's processes: Python runs what is there at their start
"""
