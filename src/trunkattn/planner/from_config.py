"""The planner of a `BatchAttention`, from its configuration and its device; the same on every device."""

from trunkattn.config import AttentionConfig
from trunkattn.planner.packing.cost import cost_model
from trunkattn.planner.planner import Planner, PlannerSpec
from trunkattn.planner.splitting import split_rule
from trunkattn.planner.work_list import INVARIANT_CHUNK_TOKENS, DeviceModel


def make_planner(config: AttentionConfig, machine: DeviceModel) -> Planner:
    """A batch-invariant plan cuts at chunks of a fixed number of tokens, in whole pages."""
    dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim)
    model = cost_model(machine, *dims, config.cache_dtype.itemsize)
    columns = -(-INVARIANT_CHUNK_TOKENS // config.page_size) if config.batch_invariant else 1
    chunk = columns * config.page_size if config.batch_invariant else 0
    rule = split_rule(machine, model, config.num_kv_heads, config.head_dim + config.value_dim, chunk)
    return Planner(PlannerSpec(config.page_size, config.policy, model, rule, columns, machine.name))
