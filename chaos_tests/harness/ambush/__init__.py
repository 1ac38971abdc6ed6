"""Faults at a place within a worker: at a point of a step, of a copy, of a checkpoint, of a rebuild.

    points.py    which points there are, and what may happen there
    inside.py    in each worker: looks at each point whether there is an order for it
    orders.py    in the harness: gives orders, and hears what was done

The product knows nothing of it: the points are put into it when its modules are imported.
"""
