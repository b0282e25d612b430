"""Five labs on getting a model's output off the GPU: the package that the notebooks use.

Read it in this order: job, pipelines, buffers, workers, device, timing; then ranges, recorder,
timeline, metrics; then costs, calibration, clock, virtual, prediction. The exercises have
verdict, slow_job, checks.
"""

import importlib

_HOME = {
    "LabError": "errors",
    "Preset": "presets",
    "get_preset": "presets",
    "open_device": "device",
    "Job": "job",
    "digest": "job",
    "segmentation_job": "workload",
    "archive": "workload",
    "class_map": "workload",
    "BufferPool": "buffers",
    "OutputWorkers": "workers",
    "StreamPipeline": "pipelines",
    "measure": "timing",
    "annotate": "ranges",
    "capture_timeline": "capture",
    "load_timeline": "trace_files",
    "shipped_timeline": "trace_files",
    "summarize": "metrics",
    "metrics_table": "metrics",
    "plot_timelines": "plot_timeline",
    "describe_timeline": "plot_timeline",
    "calibrate": "calibration",
    "load_costs": "costs",
    "save_costs": "costs",
    "shipped_costs": "costs",
    "costs_table": "costs",
    "predict": "prediction",
    "predict_all": "prediction",
    "save_predictions": "prediction",
    "prediction_table": "prediction",
    "explain": "prediction",
    "load_record": "results",
    "save_record": "results",
    "check_digests": "results",
    "ladder_table": "results",
    "plot_paths": "diagram",
    "plot_ladder": "plots",
    "plot_predictions": "plots",
    "explore": "explorer",
    "advise": "advice",
    "advice_table": "advice",
    "show_figure": "figures",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    # Loaded when first used: `labkit --help` must not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
