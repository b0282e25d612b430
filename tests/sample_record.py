"""A hand-written record whose numbers are easy to recognise: nothing here was measured."""

import copy

RATES = {
    "sequential": 100.0,
    "multi_worker": 150.0,
    "buffer_pool": 700.0,
    "pinned_async": 1234.5,
    "stream_pipeline": 1500.0,
}
_RECORD = {
    "schema": 1,
    "created": "2025-01-02T03:04:05+00:00",
    "device": {"kind": "emulated", "name": "emulated GPU (classroom)", "profile": "classroom"},
    "host": {"cores": 2, "python": "3.11.7", "torch": "2.14.1", "torchvision": "0.29.1"},
    "job": {
        "model": "deeplabv3_mobilenet_v3_large",
        "preset": "workshop",
        "batch": 8,
        "image": 256,
        "dtype": "float32",
        "output_bytes": 44040192,
        "batches": 20,
        "samples": 156,
        "process": "archive",
    },
    "ceiling": {
        "samples_per_s": 1600.0,
        "limited_by": "forward",
        "forward_s": 0.005,
        "copy_s": 0.0025,
        "slot_copy_s": 0.0026,
        "process_s": 0.004,
        "pinned_gbps": 17.6,
        "slot_gbps": 16.9,
    },
    "strategies": [
        {
            "name": name,
            "samples_per_s": rate,
            "spread": [0.9 * rate, 1.1 * rate],
            "batches": 20,
            "digest": "0123456789abcdef0123456789abcdef",
            "gpu_busy": rate / 1600,
            "predicted_samples_per_s": None,
            "workers": 2,
            "slots": 4,
            "depth": 2,
        }
        for name, rate in RATES.items()
    ],
}


def sample_record(kind: str = "emulated") -> dict:
    """A fresh copy, as if it came from a device of that kind."""
    record = copy.deepcopy(_RECORD)
    record["device"]["kind"] = kind
    if kind == "cuda":
        record["device"].update(name="NVIDIA H200", profile=None)
    return record


def row(record: dict, name: str) -> dict:
    """The record's strategy of that name."""
    return next(row for row in record["strategies"] if row["name"] == name)


def sample_costs(**changes):
    """Costs of an invented machine, with `changes`."""
    from labkit.costs import STAGES, Costs

    record = sample_record("cuda")
    given = {
        "created": record["created"],
        "device": {"kind": "cuda", "name": "NVIDIA H200", "profile": None},
        "host": record["host"],
        "job": record["job"],
        "input_bytes": 1572864,
        "workers": 2,
        "seconds": dict.fromkeys(STAGES, 0.01),
        "spread": {stage: [0.009, 0.011] for stage in STAGES},
        "slowdowns": {"process": {"process": 0.1, "copy": 0.2}},
        "once": {"start_workers_s": 1.0, "touch_s_per_gb": 0.5, "page_lock_s_per_gb": 0.04},
        "rates": {
            "flops_per_s": 1e13, "pageable_bytes_per_s": 1e10, "pinned_bytes_per_s": 5e10,
            "launch_s": 1e-5,
        },
    }  # fmt: skip
    return Costs(**{**given, **changes})
