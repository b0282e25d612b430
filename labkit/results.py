"""Records: what a run measured, on what. The only source of every number that is shown."""

import contextlib
import datetime
import functools
import json
import os
from pathlib import Path

from .errors import LabError
from .hardware import describe_device, describe_host, device_entry

NUMBER = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e15}
COUNT = {"type": "integer", "minimum": 0, "maximum": 10**9}
TEXT = {"type": "string", "maxLength": 500}


def object_schema(optional: dict | None = None, /, **properties) -> dict:
    known = {**properties, **(optional or {})}
    return {"type": "object", "properties": known, "required": list(properties)}


DEVICE = object_schema(
    kind={"enum": ["cuda", "emulated", "predicted"]},
    name=TEXT,
    profile={"type": ["string", "null"], "maxLength": 100},
)
HOST = object_schema(cores=COUNT, python=TEXT, torch=TEXT, torchvision=TEXT)
JOB = object_schema(
    model=TEXT,
    preset=TEXT,
    batch={**COUNT, "minimum": 1},
    image={**COUNT, "minimum": 1},
    dtype=TEXT,
    output_bytes=COUNT,
    batches=COUNT,
    samples=COUNT,
    process=TEXT,
)
# When, on what, and of which job: what stamp() gives.
STAMP = {"schema": {"const": 1}, "created": TEXT, "device": DEVICE, "host": HOST, "job": JOB}
SCHEMA = object_schema(
    **STAMP,
    ceiling=object_schema(
        samples_per_s=NUMBER,
        limited_by={"enum": ["forward", "copy", "process"]},
        forward_s=NUMBER,
        copy_s=NUMBER,
        slot_copy_s=NUMBER,
        process_s=NUMBER,
        pinned_gbps=NUMBER,
        slot_gbps=NUMBER,
    ),
    strategies={
        "type": "array",
        "minItems": 1,
        "maxItems": 100,
        "items": object_schema(
            {"page_locked": {"type": "boolean"}},  # false: was refused, and pageable instead
            name=TEXT,
            samples_per_s=NUMBER,
            spread={"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
            batches=COUNT,
            digest=TEXT,
            gpu_busy=NUMBER,
            predicted_samples_per_s={**NUMBER, "type": ["number", "null"]},
            workers=COUNT,
            slots=COUNT,
            depth=COUNT,
        ),
    },
)
_SIZE_LIMIT_BYTES = 2**17  # a record is some kilobytes: anything larger is something else


def make_record(job, preset, ceiling: dict, strategies: list[dict]) -> dict:
    """The record of one measurement; see SCHEMA.

    `gpu_busy` is the share of the run that the forwards would take alone.
    """
    return {**stamp(job, preset), "ceiling": ceiling, "strategies": strategies}


def stamp(job, preset) -> dict:
    """The parts of a record that say when, on what, and of which job it is."""
    process = job.process
    while isinstance(process, functools.partial):
        process = process.func
    return {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_entry(job.device),
        "host": describe_host(),
        "job": {
            "model": job.name,
            "preset": preset.name,
            "batch": job.batch,
            "image": preset.image,
            "dtype": str(job.output_dtype).removeprefix("torch."),
            "output_bytes": job.output_bytes,
            "batches": job.count,
            "samples": job.samples,
            "process": process.__name__,
        },
    }


def check_writable(path: str | Path) -> None:
    """Raise LabError unless a file can be written at `path`: asked before the work is done."""
    path = Path(path)
    try:
        if path.is_dir():
            raise LabError(f"cannot write {str(path)!r}: it is a folder")
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        probe = folder / _partial(path).name
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LabError(f"cannot write {str(path)!r}: {error.strerror}") from None


def save_record(record: dict, path: str | Path) -> Path:
    """Write `record` to `path` as JSON. Raises LabError when it cannot be written."""
    return write_json(record, path, "record")


def write_json(content: dict, path: str | Path, what: str, indent: int | None = 1) -> Path:
    """Write `content` to `path`; a reader sees the whole of it or nothing.

    Missing folders are made. Raises LabError, naming it `what`, when it cannot be written.
    """
    path = Path(path)
    separators = None if indent else (",", ":")
    partial = None
    try:
        partial = _partial(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=indent, separators=separators)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null in it
        if partial is not None:
            with contextlib.suppress(OSError, ValueError):
                partial.unlink()
        reason = getattr(error, "strerror", error)
        raise LabError(f"cannot write the {what} {str(path)!r}: {reason}") from None
    return path


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def load_record(path: str | Path) -> dict:
    """Read and check a record. Raises LabError in one line for anything that is not one."""
    record = load_json(path, SCHEMA, "record")
    for row in record["strategies"]:
        low, high = row["spread"]
        if not low <= row["samples_per_s"] <= high:
            raise LabError(f"{str(path)!r} is not a record: a rate lies outside its spread")
    return record


def load_json(path: str | Path, schema: dict, what: str) -> dict:
    """Read a JSON file of ours and check it. Raises LabError in one line, naming it `what`."""
    import jsonschema

    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise LabError(f"{str(path)!r} is not a file")
        if path.stat().st_size > _SIZE_LIMIT_BYTES:
            raise LabError(f"{str(path)!r} is too large for a {what}")
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
        json.dumps(content, ensure_ascii=False).encode()  # half a letter cannot be printed
        _validator(schema).validate(content)
    except OSError as error:
        raise LabError(f"cannot read the {what} {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LabError(f"{str(path)!r} is not JSON: {type(error).__name__}") from None
    except jsonschema.ValidationError as error:
        where = "/".join(map(str, error.absolute_path)) or "top level"
        raise LabError(f"{str(path)!r} is not a {what}: {error.message[:200]} at {where}") from None
    return content


def _validator(schema: dict):
    """One for which 8.0 is no whole number, since Python cannot count with it."""
    import jsonschema

    base = jsonschema.Draft202012Validator
    types = base.TYPE_CHECKER.redefine("integer", lambda checker, value: type(value) is int)
    return jsonschema.validators.extend(base, type_checker=types)(schema)


def refuse_constant(constant: str):
    raise ValueError(f"{constant} is no number")  # NaN passes every comparison in the schema


def is_right(record: dict, row: dict) -> bool:
    """Did this strategy give the same results as the first one in the record?"""
    return row["digest"] == record["strategies"][0]["digest"]


def speedup(record: dict, row: dict) -> float | None:
    """How many times as fast as `sequential`; None without it, and for wrong results."""
    base = record["strategies"][0]
    if base["name"] != "sequential" or not is_right(record, row):
        return None
    return row["samples_per_s"] / base["samples_per_s"]


def strategy_label(row: dict) -> str:
    """The strategy's name, and that its pool should have been page-locked but was not."""
    return row["name"] if row.get("page_locked", True) else f"{row['name']} (pageable)"


def title(record: dict) -> str:
    """One line that says what was measured on what, and whether it was emulated."""
    job, where = record["job"], describe_device(record["device"])
    return (
        f"{job['model']}, {job['batches']} batches of {job['batch']} x {job['image']}², "
        f"{job['process']} - {where}"
    )


def check_digests(record: dict) -> str:
    """A sentence that all strategies returned the same results.

    Raises LabError when one did not: then its bytes are wrong, and its speed means nothing.
    """
    first = record["strategies"][0]
    for row in record["strategies"]:
        if not is_right(record, row):
            raise LabError(
                f"{row['name']} returned other results than {first['name']} "
                f"(digest {row['digest']}, not {first['digest']}): its bytes are wrong"
            )
    names = ", ".join(row["name"] for row in record["strategies"])
    return f"{names}: {first['batches']} batches each, results equal (digest {first['digest']})"


def ladder_table(record: dict):
    """The record as a rich table: one row a strategy, and the ceiling."""
    from rich import box
    from rich.table import Table

    ceiling = record["ceiling"]["samples_per_s"]
    table = Table(title=title(record), title_justify="left", box=box.SIMPLE, padding=(0, 1))
    table.add_column("strategy", no_wrap=True)
    # The share that the forwards would take, or what was predicted: both are too wide for a screen.
    foreseen = any(row["predicted_samples_per_s"] for row in record["strategies"])
    last = "predicted" if foreseen else "busy"
    for name in ("samples/s", "min to max", "gain", "of ceiling", last):
        table.add_column(name, justify="right", no_wrap=True)
    for row in record["strategies"]:
        times = speedup(record, row)
        low, high = row["spread"]
        right = is_right(record, row)
        table.add_row(
            strategy_label(row).replace(" ", "\n"),  # a screen is no wider
            _rate(row["samples_per_s"]),
            f"{_rate(low)} to {_rate(high)}",
            "wrong" if not right else "" if times is None else f"{times:.2f}x",
            f"{row['samples_per_s'] / ceiling:.0%}" if right else "",
            _foreseen(row) if foreseen else f"{row['gpu_busy']:.0%}",
        )
    table.add_section()
    table.add_row(f"ceiling: {record['ceiling']['limited_by']}", _rate(ceiling))
    return table


def _foreseen(row: dict) -> str:
    rate = row["predicted_samples_per_s"]
    return "" if rate is None else f"{_rate(rate)} {prediction_error(row):+.0%}"


def prediction_error(row: dict) -> float:
    """By what share the prediction was too high."""
    return row["predicted_samples_per_s"] / row["samples_per_s"] - 1


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:,.1f}"
