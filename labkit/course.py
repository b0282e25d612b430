"""How long it takes to run the labs: measured by `labkit run`, told at the top of each."""

import datetime
from pathlib import Path

from .hardware import describe_device, describe_host, device_entry
from .results import DEVICE, HOST, TEXT, load_json, object_schema, write_json

FOLDER = Path(__file__).parent.parent / "figures" / "times"
_SECONDS = {"type": "number", "minimum": 0, "maximum": 1e6}
SCHEMA = object_schema(
    schema={"const": 1},
    created=TEXT,
    device=DEVICE,
    host=HOST,
    preset=TEXT,
    solved={"type": "boolean"},
    seconds={"type": "object", "maxProperties": 100, "additionalProperties": _SECONDS},
)


def save_times(seconds: dict[str, float], path: Path, device, preset: str, solved: bool) -> Path:
    """Write how many `seconds` each notebook took, by name. Raises LabError as save_record does."""
    times = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_entry(device),
        "host": describe_host(),
        "preset": preset,
        "solved": solved,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    return write_json(times, path, "record of times")


def load_times(path: Path) -> dict:
    """What `save_times` wrote. Raises LabError for anything else."""
    return load_json(path, SCHEMA, "record of times")


def time_needed(name: str, folder: Path = FOLDER) -> str:
    """How long the cells of notebook `name` took wherever that was measured, in words."""
    found = []
    for path in sorted(folder.glob("*.json")):
        times = load_times(path)
        if name in times["seconds"]:
            where = f"{describe_device(times['device'])}, {times['host']['cores']} cores"
            found.append(f"{times['seconds'][name]:.0f} s ({where}, preset {times['preset']})")
    return "; ".join(found) or "not measured yet"
