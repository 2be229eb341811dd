"""These tests run in verl's own environment: `make test-verl`."""
