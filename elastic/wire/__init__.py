"""Generated from proto/elastic/wire; `make proto` writes it anew."""
