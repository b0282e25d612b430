"""The one error type that people see: a single line that says what happened and what to do."""


class LabError(Exception):
    """What happened, the value seen, and what to do, in one line."""

    def _render_traceback_(self):
        # IPython shows this instead of a traceback, so a notebook prints one line as well.
        return [f"{type(self).__name__}: {self}"]
