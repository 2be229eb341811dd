"""Ring 3: one short adapter per training framework: unpack, call, repack. Importing a hook imports its framework."""
