"""Training scripts as people write them for torchrun; none of them knows of this project, but `drawn.py`.

Each has a `main` that takes the number of epochs. All train for seconds on a CPU; some sleep for
NAP seconds a batch.
"""
