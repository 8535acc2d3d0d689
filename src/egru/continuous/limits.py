"""Limits of a run: the number of events per sample, the resolution of their times, the number of panels."""

import numpy as np
import torch
from torch import Tensor

from egru.continuous.problem import Problem

MAX_PANELS = 10**9
"""The maximum number of panels of one unit between two events that reach it."""


MAX_LIF_EVENTS = 10**6
"""The default of ``max_events`` for LIF neurons: their current has no bound, so they have no refractory time."""


class EventLimitError(RuntimeError):
    """A sample emitted more events than ``max_events``, than any network can emit, or than times can distinguish."""


def event_bound(theta: Tensor, tau_m: float | Tensor, horizon: float) -> float:
    """Return an upper bound on the number of events of one sample.

    After a reset, a unit needs at least ``tau_m log(1 / (1 - theta))`` to reach its threshold again, because ``u`` and
    ``z`` are at most 1. Units with ``theta >= 1`` never emit an event.
    """
    taus = torch.as_tensor(tau_m).expand_as(theta)
    thresholds, taus = (x.detach().cpu().double().numpy() for x in (theta, taus))
    active = thresholds < 1
    return float((1 + horizon / (-taus[active] * np.log1p(-thresholds[active]))).sum())


def event_limit(problem: Problem) -> int:
    """Return the number of events per sample above which a run raises :class:`EventLimitError`."""
    max_events = problem.options.max_events
    if problem.options.linear:
        return MAX_LIF_EVENTS if max_events is None else max_events
    bound = min(event_bound(problem.theta, problem.tau_m, problem.longest_horizon), 2.0**62)
    return int(bound) if max_events is None else min(max_events, int(bound))


def limit_error(problem: Problem, sample: int, time: float) -> EventLimitError:
    """Return the error for ``sample``, which exceeded :func:`event_limit` at ``time``."""
    max_events, limit = problem.options.max_events, event_limit(problem)
    bound = "the default of max_events" if problem.options.linear else "the refractory-time bound"
    reason = f"max_events={max_events}" if max_events is not None and max_events <= limit else bound
    return EventLimitError(
        f"sample {sample} emitted more than {limit} events ({reason}) by time {time:g} of "
        f"{float(problem.horizons[sample]):g}; "
        "weaken the recurrent excitation, raise the thresholds or max_events, or shorten the horizon"
    )


def resolution_error(sample: int, unit: int, time: float) -> EventLimitError:
    """Return the error for two events of ``unit`` whose times round to the same number."""
    return EventLimitError(
        f"unit {unit} of sample {sample} emitted two events at time {time:g}, because the time between them is below "
        "the resolution of float64; raise tau_m or the threshold, or shorten the horizon"
    )


def panel_bound(problem: Problem) -> float:
    """Return a bound on the panels of one unit between two events, without those added where activations are fast."""
    shared = problem.tau_s.dim() == problem.tau_m.dim() == 0
    if shared and not problem.options.adaptive:  # without the overhead of arrays
        ratio = float(problem.tau_s.detach()) / float(problem.tau_m.detach())
        if 45 * (1 + ratio) / problem.options.panel <= MAX_PANELS:
            return 45 * (1 + ratio) / problem.options.panel
    return float(panel_counts(problem).max(initial=0.0))


def panel_counts(problem: Problem) -> np.ndarray:
    """Return the bound of :func:`panel_bound` for each unit, or for all of them if their time constants are shared."""
    tau_s, tau_m, tau_a = (x.detach().cpu().double().numpy() for x in (problem.tau_s, problem.tau_m, problem.tau_a))
    if not problem.options.adaptive:
        tau_a = tau_s
    slow, fast = np.maximum(tau_s, tau_a), np.minimum(tau_s, tau_a)
    return np.minimum(problem.longest_horizon, 45 * slow) * (1 / fast + 1 / tau_m) / problem.options.panel
