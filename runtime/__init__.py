"""Inside the training process: the loop a script writes in, the ring, the copies of the state. Imports torch."""
