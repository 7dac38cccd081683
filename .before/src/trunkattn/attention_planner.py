"""The planner of a `BatchAttention`, from its configuration and its device; the same on every device."""

from trunkattn.attention_config import AttentionConfig
from trunkattn.kernels.tile_table import INVARIANT_CHUNK_TOKENS, GpuTile
from trunkattn.plan_format import DeviceModel
from trunkattn.planner.build import Planner, PlannerSpec
from trunkattn.planner.cost_model import cost_model
from trunkattn.planner.splitting import split_rule
from trunkattn.planner.tiling import TileKind


def make_planner(config: AttentionConfig, machine: DeviceModel) -> Planner:
    """A batch-invariant plan cuts at chunks of a fixed number of tokens, in whole pages."""
    dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim)
    model = cost_model(machine, *dims, config.cache_dtype.itemsize)
    columns = -(-INVARIANT_CHUNK_TOKENS // config.page_size) if config.batch_invariant else 1
    chunk = columns * config.page_size if config.batch_invariant else 0
    rule = split_rule(machine, model, config.num_kv_heads, config.head_dim + config.value_dim, chunk)
    return Planner(PlannerSpec(config.page_size, config.policy, model, rule, columns, machine.name))


def tile_kind(tile: GpuTile, processors: int, key_bytes: int = 512) -> TileKind:
    """A tile of the table as the planner sees it. key_bytes: of a key and its value; the table's times are for 512."""
    return TileKind(
        rows=tile.block_m,
        block_tokens=tile.block_n,
        programs=processors * tile.programs,
        block_ns=(tile.block_ns[0] * key_bytes // 512, tile.block_ns[1] * key_bytes // 512),
        chain_ns=(tile.chain_ns[0] * key_bytes // 512, tile.chain_ns[1] * key_bytes // 512),
        subtiles=tile.subtiles,
        private_tokens=tile.private_n,
        paired=not tile.hopper,
        read_percent=tile.read_percent,
        together=tile.programs,
    )
