"""The compiled core for the CPU, or the reason there is none."""
