"""How the faults of a plan are done to a running job: one module for each thing that they are done to.

Each takes the scene, what is planned, and whom; it writes to the journal what it did, and leaves in `scene.running`
what has to be ended. Raises NotNow or Impossible with nothing done.
"""
