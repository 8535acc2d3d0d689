"""The reason why an energy counter cannot be read."""


class CounterUnavailable(Exception):
    """A counter that this machine does not have or does not let us read. The message is one sentence."""
