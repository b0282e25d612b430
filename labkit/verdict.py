"""Verdict: what a check says of an attempt. Running an attempt so that nothing stops the notebook.

A check is a function that examines an attempt and returns what it found to be right, or raises
Wrong. `verdict` makes of it one that always returns a Verdict: pass, wrong, not attempted.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .errors import LabError

# For an attempt that waits for what never comes. Those that end take a second or two.
LIMIT_S = 20.0


@dataclass(frozen=True, repr=False)
class Verdict:
    """`outcome` is "pass", "wrong", "not attempted" or "not checked"; true only for a pass."""

    outcome: str
    message: str

    def __bool__(self) -> bool:
        return self.outcome == "pass"

    def __repr__(self) -> str:
        return f"{self.outcome}: {self.message}"


class Wrong(Exception):
    """What is wrong with an attempt: what was seen, and the rule that it breaks."""


class _NotAttempted(Exception):
    pass


class _TooLong(BaseException):  # an attempt's own `except Exception` must not swallow it
    pass


def verdict(examine: Callable[..., str]) -> Callable[..., Verdict]:
    """Make of `examine(attempt, ...)` a check that returns a Verdict and never raises."""

    @functools.wraps(examine)
    def check(attempt, *parts) -> Verdict:
        try:
            with _time_limit(LIMIT_S):
                return Verdict("pass", examine(attempt, *parts))
        except _NotAttempted:
            return Verdict("not attempted", "take the line with NotImplementedError away to begin")
        except Wrong as error:
            return Verdict("wrong", str(error))
        except _TooLong:
            return Verdict(
                "wrong",
                f"{_name(attempt)} was not done after {LIMIT_S:.0f} s: it waits for something "
                "that nobody does, or a loop in it never ends",
            )
        except LabError as error:  # of the machine, such as too little shared memory
            return Verdict("not checked", str(error))

    return check


def call(attempt, *args):
    """`attempt(*args)`, with an exception in it told in one line: what it was and where."""
    if not callable(attempt):
        raise Wrong(f"a function is needed here, this is {describe(attempt)}")
    try:
        return attempt(*args)
    except NotImplementedError as error:
        if not error.args:  # the line that every exercise starts with; torch's own say more
            raise _NotAttempted from None
        raise Wrong(_explain(attempt, error)) from None
    except (Exception, SystemExit) as error:
        raise Wrong(_explain(attempt, error)) from None


def compare(results, expected: list[torch.Tensor]) -> None:
    """Raise Wrong unless `results` are, byte for byte, the host tensors of `expected`.

    It names the batches that are wrong, and whose bytes they have instead.
    """
    if not isinstance(results, list | tuple):
        raise Wrong(f"a list of {len(expected)} tensors must come back, got {describe(results)}")
    if len(results) != len(expected):
        raise Wrong(
            f"{len(results)} results came back for {len(expected)} batches: "
            "every batch is due exactly once"
        )
    for batch, result in enumerate(results):
        if type(result) is not torch.Tensor or result.is_cuda:
            raise Wrong(
                f"the result of batch {batch} must be a tensor on the host, got {describe(result)}"
            )
    faults = [fault for batch in range(len(results)) if (fault := _fault(batch, results, expected))]
    if faults:
        raise Wrong(f"{len(faults)} of {len(results)} batches are wrong: {'; '.join(faults[:3])}")


def _fault(batch: int, results, expected: list[torch.Tensor]) -> str:
    """What is wrong with the bytes of `batch`, in words; empty if nothing is."""
    result, right = results[batch], expected[batch]
    if result.shape == right.shape and _same(result, right):
        return ""
    for other, candidate in enumerate(expected):
        if _same(result, candidate):
            return f"batch {batch} has the bytes of batch {other}"
    if result.shape != right.shape or result.dtype != right.dtype:
        return (
            f"batch {batch} is {tuple(result.shape)} {result.dtype}, "
            f"not {tuple(right.shape)} {right.dtype}"
        )
    got = bytes_of(result)
    if not got.any():
        return f"batch {batch} is still all zeros, as its memory was at first"
    wrong = (got != bytes_of(right)).nonzero().flatten()
    seen = (
        f"batch {batch} has {len(wrong):,} of {len(got):,} bytes wrong, from {int(wrong[0]):,} on"
    )
    for other, candidate in enumerate(expected):
        if candidate.nbytes >= len(got) and torch.equal(got[wrong], bytes_of(candidate)[wrong]):
            return f"{seen}, and all of them are batch {other}'s"
    return seen


def _same(result: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether `result` has the bytes of `candidate`, or of its first samples."""
    return (
        result.dtype == candidate.dtype
        and result.shape[1:] == candidate.shape[1:]
        and torch.equal(bytes_of(result), bytes_of(candidate[: len(result)]))
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a host tensor as a flat uint8 tensor."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def need_number(value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(f"a number must come back, got {describe(value)}")
    return float(value)


@contextlib.contextmanager
def rule(text: str):
    """Whatever is found wrong inside breaks this rule: say so behind it."""
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{error}. {text}") from None


@contextlib.contextmanager
def _time_limit(seconds: float):
    """Raise _TooLong in the block after `seconds`. Only the main thread can be interrupted."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() != threading.main_thread():
        yield
        return

    def too_long(*_):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _explain(attempt, error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "") or "no message"
    said = f"{_name(attempt)} raised {type(error).__name__}: {first}"
    code, trace, line = getattr(attempt, "__code__", None), error.__traceback__, None
    while trace is not None:
        if code is not None and trace.tb_frame.f_code.co_filename == code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return said if line is None else f"{said} (line {line} of its cell)"


def _name(attempt) -> str:
    return getattr(attempt, "__name__", "your function")


def describe(value) -> str:
    """What `value` is, in a few words of one line."""
    if value is None:
        return "None"
    return f"{type(value).__name__} {' '.join(repr(value).split())[:40]}"
