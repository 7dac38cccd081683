"""The floors of the package, which `test_floors.py` holds every import to: a module imports only from lower ones."""

from types import MappingProxyType

TOP_FLOOR = 11
# A file or folder of a unit may stand lower than the rest of it.
FLOORS = MappingProxyType(
    {
        "dtypes": 0,
        "compiled": 1,
        "interrupts": 0,
        "lazy": 1,
        "memory": 0,
        "names": 0,
        "numerics": 0,
        "other_work": 0,
        "reference": 1,
        "validate": 0,
        "derivatives": 0,
        "config": 1,
        "step_inputs": 2,
        "layer_inputs": 2,
        "attention_op": 3,
        "planner": 2,
        "backend": 3,
        "gpu/cards": 3,
        "training/spec": 4,  # what the table of kernels must know of those for training
        "cpu": 5,
        "gpu": 5,
        "training": 6,
        "ops": 6,
        "attention": 7,
        "kv_cache": 8,
        "engine": 9,
        "server": 10,
        "analysis": 10,
        "integrations": TOP_FLOOR,
        "cli": TOP_FLOOR + 1,  # tells of the integrations
        "__main__": TOP_FLOOR + 2,  # `python -m trunkattn`: runs the command, and nothing imports it
    }
)
# The floors inside gpu/. A spec imports no source, so that the table of kernels stands below all sources.
GPU_FLOORS = MappingProxyType(
    {
        "cards": 0,
        "layer": 0,
        "tiles": 0,
        "compiling": 0,
        "graphs": 0,
        "workspace": 0,
        "planner_compilation/process": 1,
        "bound": 1,
        "portable/spec": 1,  # its tiles serve other kernels, too
        "kernel": 3,
        "launch_order": 4,
        "arrays": 5,
        "portable": 6,
        "hopper": 6,
        "overlap": 6,
        "chunk_planner": 6,
        "launch": 7,
        "step_choice": 7,
        "device_planner": 8,
        "step": 8,
        "step_planners": 9,
        "attention": 10,
        "planner_compilation/program": 11,  # nothing imports it
    }
)
# The floors of every other folder of gpu/ with kernels, which is one with a spec: a new one needs no row.
SPEC_FLOOR, KERNEL_FLOOR = 2, 7
# The floors inside other large folders: of their files, and of the folders in them.
ENGINE_FLOORS = MappingProxyType(
    {
        "config": 0,
        "outputs": 0,
        "prompts": 0,
        "sampling_params": 0,
        "stats": 0,
        "suspects": 0,
        "turns": 0,
        "forms": 1,
        "model": 1,
        "graphs": 2,
        "sampling": 2,
        "scheduling": 3,
        "answers": 4,
        "runner": 4,
        "token_rules": 4,
        "assembly": 5,
        "checked_request": 5,
        "engine": 6,
        "memory": 6,
        "shared_engine": 7,
        "llm": 8,
    }
)
SERVER_FLOORS = MappingProxyType(
    {
        "engine_loop": 0,
        "lanes": 0,
        "limits": 0,
        "merged_streams": 0,
        "stops": 0,
        "tool_calls": 0,
        "errors": 1,
        "monitoring": 1,
        "options": 1,
        "admission": 2,
        "bodies": 2,
        "middleware": 2,
        "forms": 3,
        "prompts": 3,
        "running": 3,
        "sampling": 4,
        "service": 5,
        "endpoints": 6,
        "app": 7,
    }
)
ANALYSIS_FLOORS = MappingProxyType(
    {
        "batch": 0,
        "parallel": 0,
        "settings": 0,
        "texts": 0,
        "pricing": 1,
        "records": 1,
        "trees": 1,
        "requests": 2,
        "explain": 3,
        "figures": 3,
        "formats": 3,
        "simulation": 3,
        "reading": 4,
        "reports": 4,
        "spoilers": 5,
        "ceiling": 6,
        "analyze": 7,
    }
)
CLI_FLOORS = MappingProxyType(
    {
        "models": 0,
        "packages": 0,
        "streams": 0,
        "log": 1,
        "options": 1,
        "analyze": 2,
        "demo": 2,
        "explain": 2,
        "generate": 2,
        "serve": 2,
        "doctor": 3,  # tells of the demo
        "app": 4,
    }
)
INNER_FLOORS = MappingProxyType(
    {
        "gpu": GPU_FLOORS,
        "engine": ENGINE_FLOORS,
        "server": SERVER_FLOORS,
        "analysis": ANALYSIS_FLOORS,
        "cli": CLI_FLOORS,
    }
)
