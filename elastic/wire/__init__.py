"""Generated from proto/elastic/wire; `make proto` writes it anew."""

MESSAGE_LIMIT = 64 * 2**20
"""Bytes of one message on a stream; a generation of 65,536 members fits."""
