"""Breaks a running job on purpose and judges the history afterwards. Shipped, so that users can do it to theirs."""
