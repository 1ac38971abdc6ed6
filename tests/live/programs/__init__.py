"""Programs that the live tests run as workers."""
