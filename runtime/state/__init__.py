"""What the training state is: everything registered and job.state; read, written, compared, described.

training_state.py    everything registered, and job.state, as one copy
registrable.py       what may be registered
script_state.py      job.state
encoding.py          values as typed JSON and raw bytes
small_values.py      values small enough for a header
change_detection.py  whether registered state changed while it must not
available_memory.py  how much memory a process can still get
"""
