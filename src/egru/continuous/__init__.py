"""The event-based GRU in continuous time: exact event times, exact gradients."""
