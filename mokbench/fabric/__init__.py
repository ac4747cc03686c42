"""How a rank reaches its peers: host (POSIX shared memory) so far."""
