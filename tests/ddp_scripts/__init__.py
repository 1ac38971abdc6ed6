"""Training scripts as people write them for torchrun; none of them knows of this project.

Each has a `main` that takes the number of epochs, and trains for seconds on a CPU; some sleep for NAP seconds a batch.
"""
