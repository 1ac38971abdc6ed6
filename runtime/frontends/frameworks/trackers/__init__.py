"""What frameworks log to trackers, as one leader after the other writes it: every worker keeps the last rows, and the
next leader goes on in the same files, or in the same run.

    rows.py         rows that were logged, in every worker
    event_files.py  files of TensorBoard that transformers writes
    runs.py         runs of MLflow and of Weights & Biases
"""
