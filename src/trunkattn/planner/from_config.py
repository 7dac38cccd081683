"""Makes the planner of a `BatchAttention` from its configuration and a description of its device."""

from trunkattn.config import AttentionConfig
from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs.cost import cost_model
from trunkattn.planner.planner import Planner, PlannerSpec
from trunkattn.planner.splitting import split_rule
from trunkattn.planner.work_list import PACK_SPAN_TOKENS


def make_planner(config: AttentionConfig, machine: DeviceModel) -> Planner:
    """The planner for one attention on one device.

    A batch-invariant plan shares and splits KV only at multiples of a fixed number of tokens, in whole pages.
    """
    model = cost_model(
        machine,
        config.num_qo_heads,
        config.num_kv_heads,
        config.cached_numbers,
        config.value_dim,
        config.cache_dtype.itemsize,
    )
    share_columns, fixed_chunk = 1, 0
    if config.batch_invariant:
        share_columns = -(-PACK_SPAN_TOKENS // config.page_size)
        fixed_chunk = share_columns * config.page_size
    head_dims = config.head_dim + config.value_dim
    rule = split_rule(machine, model, config.num_kv_heads, head_dims, fixed_chunk)
    return Planner(
        PlannerSpec(
            page_size=config.page_size,
            policy=config.policy,
            model=model,
            rule=rule,
            share_columns=share_columns,
            tile_name=machine.name,
        )
    )
