"""`BatchAttention`: plan once per step, run once per layer, on any paged KV cache."""

from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

import torch

from trunkattn.attention_op import number_of, run_in_graph
from trunkattn.backend import PARTS, Backend, Counters, Part, PlannedStep
from trunkattn.config import BACKENDS, AttentionConfig, Capacity
from trunkattn.interrupts import held_interrupts
from trunkattn.layer_inputs import LayerInputs, Scale, check_layer, of_layer
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED, PlanStats
from trunkattn.step_inputs import PromptChunks, StepInputs, all_on_gpu, check_chunks, check_on_device, check_step
from trunkattn.validate import check_int, described


class Plan:
    """The plan of one step for one window, made by `BatchAttention.plan`. It owns its arrays, so any number of plans
    can be alive."""

    def __init__(
        self, step: PlannedStep, owner: "BatchAttention", last_page: int, window: int, refills: bool = True
    ) -> None:
        """Wraps a planned step. refills: whether another batch may be planned into it."""
        self.step, self.owner, self.last_page, self.window, self.refills = step, owner, last_page, window, refills
        self.number = number_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles, because their kernels would read the arrays of the original plan."""
        raise TypeError("a Plan is copied or pickled: expected one made by BatchAttention.plan, so plan there again")

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out that `run` expects. For a plan made on the device with query_start_loc it is a lower bound,
        because the host does not know the number."""
        return self.step.num_query_tokens

    @property
    def num_chunks(self) -> int:
        """Number of requests that a separate kernel computes as prompt chunks. Always 0 on a CPU."""
        return self.step.num_chunks

    @property
    def stats(self) -> PlanStats:
        """KV tokens that this plan reads, KV tokens without sharing, its items, and why it was chosen (see
        `PlanStats`). Waits for the device if the plan was made there. After `run`, `stats.reason` also says which
        layers a faster kernel could not read, and why."""
        return self.step.stats()

    @property
    def counters(self) -> Counters:
        """Counts that need no wait for the device, for the metrics of a serving engine.

        `counters.kv_tokens` is int64 [2] on the device: KV tokens read, and KV tokens without sharing, for all requests
        except prompt chunks. It is None for plans made on the host, whose `stats` never waits. `counters.chunks` has
        the statistics of the prompt chunks; None if the plan has no chunks.
        """
        return self.step.counters

    def only(self, part: Part) -> "Plan":
        """A plan with the same arrays but only the launches of one part, which saves some µs per layer.

        No other batch can be planned into the result. But if a later batch that has only this part is planned into the
        original plan, a CUDA graph that ran the result computes it.

        Args:
            part: "decodes" leaves out the kernel for prompt chunks, which with a capacity is launched even if there are
                none. If the plan has no such launch, the result is the plan itself. "chunks" leaves only that kernel,
                for a plan made on the device whose requests are all prompt chunks.

        Raises:
            ValueError: the other part has something to compute, or there is no such part.
        """
        if part not in PARTS:
            raise ValueError(f"part={part!r}: expected one of {', '.join(map(repr, PARTS))}")
        step = self.step.only(part)
        if step is None:
            expected = {
                "decodes": f"a plan without prompt chunks, and this one has {self.num_chunks}; see num_chunks",
                "chunks": "a plan made on the device, all requests of which are prompt chunks",
            }[part]
            raise ValueError(f"part={part!r}: expected {expected}")
        return self if step is self.step else Plan(step, self.owner, self.last_page, self.window, refills=False)

    def check(self) -> None:
        """Verifies the invariants of the work list: each visible (query, key) pair is computed once, partial slots are
        distinct, and items are in order and fit their tiles.

        Raises:
            AssertionError: an invariant does not hold; the message names it and the item or query.
            RuntimeError: Python runs with -O, which removes assertions.
        """
        if not __debug__:
            raise RuntimeError("Plan.check consists of assertions, which python -O leaves out: run Python without -O")
        self.step.check()


class BatchAttention:
    """Attention of a batch over a paged KV cache that reads what requests share once.

    Call `plan` once per step (and window) and `run` once per layer. Do not use one object from several threads at once,
    because all of its plans share a workspace.

    A query, key or value that is not finite makes outputs NaN or infinite, but only those of requests that see it.
    There are two exceptions, both on a GPU. A value also reaches the other requests in its tile of up to 64 rows,
    because their weight for it is 0, and 0 times NaN is NaN. With a sliding window, a value just before the window
    reaches queries that see other tokens of its page.

    Args:
        config: shape and options.
        device: where q and the caches are. "cuda" means the GPU that is current when the object is made.
        capacity: upper bounds of a step; None: there are none. With a capacity a plan on a GPU has arrays of fixed
            sizes, and a CUDA graph captured with it serves every batch that `plan(..., into=plan)` puts there. Without
            a capacity a later plan may move the workspace, and an earlier graph must not be replayed then.

    Sources: PAT, https://arxiv.org/abs/2511.22333, §5, and RelayAttention, https://arxiv.org/abs/2402.14808, §3.

    Raises:
        ValueError: with the reasons, if the device cannot run the configuration.

    Example:
        >>> config = AttentionConfig(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
        >>> attention = BatchAttention(config, device="cpu")
        >>> trunk, leaves = torch.arange(64).expand(3, 64), torch.arange(64, 67).view(3, 1)  # pages of 3 requests
        >>> block_table = torch.cat([trunk, leaves], dim=1).int()
        >>> plan = attention.plan(block_table, torch.tensor([1025, 1030, 1040], dtype=torch.int32))
        >>> k_cache, v_cache = torch.randn(2, 67, 16, 2, 64)
        >>> attention.run(plan, torch.randn(3, 4, 64), k_cache, v_cache).shape
        torch.Size([3, 4, 64])
        >>> plan.stats.kv_tokens_read, plan.stats.kv_tokens_per_query
        (1047, 3095)
    """

    def __init__(
        self, config: AttentionConfig, device: torch.device | str = "cuda", capacity: Capacity | None = None
    ) -> None:
        if not isinstance(config, AttentionConfig):
            raise TypeError(f"config is {described(config)}: expected an AttentionConfig")
        if capacity is not None and not isinstance(capacity, Capacity):
            raise TypeError(f"capacity is {described(capacity)}: expected a Capacity or None")
        reasons = config.supports(device)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.config, self.device, self.capacity = config, torch.device(device), capacity
        if self.device.type == "cpu":
            self.device = torch.device("cpu")  # tensors there have no index
        elif self.device.index is None:  # its arrays stay on one GPU, whichever is current later
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        source = import_module(BACKENDS[self.device.type].source)
        self._backend: Backend[Any] = source.make(config, self.device, capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles from the arguments only: a copy has its own workspace, and no plans."""
        return type(self), (self.config, self.device, self.capacity)

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        sliding_window: int | None = None,
        *,
        num_pages: int | None = None,
        into: Plan | None = None,
        chunks: PromptChunks | None = None,
    ) -> Plan:
        """The work list of one step.

        With a capacity and the policy `auto`, tensors that all lie on a GPU are planned there, on the current stream:
        nothing is copied or waited for, and with `into` nothing is allocated. Values that are out of bounds are then
        clamped, and reported by `check`; `stats` waits for the device and reads the tensors as they are by then. The
        buffers that a plan is made in belong to this object: its plans are to be made on one stream.

        Args:
            block_table: [num_requests, max_pages] int32, on the CPU or this device (where it is not planned there, it
                is copied, which waits for the device); entries past a request's pages are never looked at.
            seq_lens: [num_requests] int32, KV length including this step's query tokens.
            query_start_loc: [num_requests + 1] int32; None: one query token each. Rows of query length 0 are padding.
            sliding_window: tokens a query sees, itself included; None: all.
            num_pages: pages in the cache, to check page ids against; None: the capacity's; without either only `run`
                checks. None for tables that are planned on the device.
            into: a plan of this object, with the same window, that is to become the plan of this batch, and is
                returned; only with a capacity. A CUDA graph that ran it runs the new batch.
            chunks: the last requests, which are prompt chunks whose lengths the host knows too; only for tables that
                are planned on the device, with a max_chunk_tokens and without batch invariance. A kernel of their own
                computes them then, on H100 and H200 together with the decodes (POD-Attention §4), and each reads its
                own KV. Without it they are rows of tiles. Pages outside the cache are clamped.

        Raises:
            ValueError, TypeError: naming the argument, the value and what was expected; no plan is made or changed.
        """
        inputs = StepInputs(block_table, seq_lens, query_start_loc, sliding_window, num_pages)
        window = UNLIMITED
        if sliding_window is not None:
            window = min(check_int("sliding_window", sliding_window, at_least=1), UNLIMITED)
        if into is not None:
            self._check_into(into, window)
        step, last_page = self._plan_step(inputs, window, into.step if into else None, chunks)
        if into is None:
            return Plan(step, self, last_page, window)
        into.step, into.last_page = step, last_page
        return into

    def _plan_step(
        self, inputs: StepInputs, window: int, earlier: PlannedStep | None, chunks: PromptChunks | None
    ) -> tuple[PlannedStep, int]:
        """The step, and the highest page that it may read."""
        on_device = self.capacity is not None and self._backend.plans_on_device and all_on_gpu(inputs)
        no_chunks = self.config.batch_invariant or self.config.latent_dim is not None
        if chunks is not None and (not on_device or no_chunks):
            raise ValueError(
                "chunks is given: expected tables on a GPU, policy='auto' without batch_invariant or latent_dim, and a "
                "capacity with max_chunk_tokens; leave it out, and the host finds prompt chunks itself"
            )
        if on_device:
            assert self.capacity is not None
            check_on_device(inputs)
            if chunks is not None:
                check_chunks(chunks, inputs, self.config.page_size, self.capacity)
            return self._backend.plan_on_device(inputs[:3], window, earlier, chunks), self.capacity.num_pages - 1
        # Compiled functions that return arrays may crash when they are interrupted. torch.compile cannot trace signals.
        with nullcontext() if torch.compiler.is_compiling() else held_interrupts():
            checked = check_step(inputs, self.config.page_size, self.capacity, self.device)
            tables = StepTables(checked.block_table, checked.seq_lens, checked.query_start_loc, window)
            return self._backend.plan(tables, earlier), checked.last_page

    def overlaps(self, chunks: PromptChunks) -> bool:
        """Whether a plan with these chunks computes them and the decodes in one kernel, because that is faster by the
        card's measured times (POD-Attention §4). Always False except on an H100 or H200."""
        return self._backend.overlaps(chunks)

    def check(self) -> None:
        """Waits for the device, and reports bad values that plans made there have met since the last check.

        Raises:
            ValueError: naming what was out of bounds in a block table, lengths or query starts.
        """
        self._backend.check()

    @property
    def errors(self) -> torch.Tensor | None:
        """[1] int32 on the device, not 0 if `check` would raise: to be copied without a wait. None if nothing is
        planned on the device. `gpu.device_planner.planner.errors_of` puts it in words."""
        return self._backend.errors

    def _check_into(self, into: Any, window: int) -> None:
        self._check_own("into", into)
        if self.capacity is None:
            raise ValueError("into is given: expected a BatchAttention with a capacity")
        if not into.refills:
            raise ValueError("into is a plan of `only`: expected the plan that it was made of")
        if into.window != window:
            given, kept = (None if each == UNLIMITED else each for each in (window, into.window))
            raise ValueError(f"sliding_window={given}: expected {kept}, the window that `into` was planned with")

    def _check_own(self, name: str, plan: Any) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"{name} is {described(plan)}: expected a Plan")
        if plan.owner is not self:
            raise ValueError(f"{name} belongs to another BatchAttention: expected a plan made by this one")

    def run(
        self,
        plan: Plan,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer.

        Args:
            plan: a plan of this object.
            q: [num_query_tokens, num_qo_heads, head_dim] in the configured dtype. With a capacity it may have more
                rows, up to max_query_tokens: their `out` is not written, and their lse is undefined. If query_start_loc
                is on the device, the host cannot check that q has enough rows; with too few, results are undefined.
                With a latent_dim q may also be a pair: the first latent_dim columns (absorbed) and the others (rope).
            k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim / head_dim_v] in the cache dtype, any
                strides with a contiguous last dimension. With a latent_dim, k_cache is [num_pages, page_size, head_dim]
                and v_cache None: the values are its first columns.
            out: [num_query_tokens, num_qo_heads, head_dim_v] to write into, any strides. It must not share memory with
                another argument. None: a new tensor.
            return_lse: also return lse [num_query_tokens, num_qo_heads] float32 (natural log, sinks not included).
            q_scale, k_scale, v_scale: factors of stored q, k and v: a number, or a tensor of one element or
                [num_kv_heads]. With a latent_dim k_scale is the factor of whole rows, and v_scale is None.
            sinks: [num_qo_heads] extra logits, given iff the configuration says so.

        Raises:
            ValueError, TypeError: naming the argument, the value and what was expected; nothing is computed then.
        """
        config = self.config
        self._check_own("plan", plan)
        tensors: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "sinks": sinks}
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        inputs = of_layer(config, LayerInputs(**tensors, **scales, return_lse=return_lse))
        q, k_cache = inputs.q, inputs.k_cache
        rows = plan.num_query_tokens
        if self.capacity is not None and isinstance(q, torch.Tensor) and q.dim():
            rows = min(max(rows, q.shape[0]), self.capacity.max_query_tokens + self.capacity.max_chunk_tokens)
        check_layer(config, self.device, rows, inputs)
        if plan.last_page >= k_cache.shape[0]:
            raise ValueError(
                f"k_cache has {k_cache.shape[0]} pages: expected more than the plan's page {plan.last_page}"
            )
        if self.capacity is not None and q.is_cuda and k_cache.shape[0] < self.capacity.num_pages:
            # a graph that captures this call may run a later plan with any page of the capacity
            raise ValueError(
                f"k_cache has {k_cache.shape[0]} pages: expected at least the capacity's, {self.capacity.num_pages}"
            )
        shape = (rows, config.num_qo_heads, config.value_dim)
        result = torch.empty(shape, dtype=config.dtype, device=self.device) if out is None else out
        lse = self._compute(plan, inputs, result)
        return (result, lse) if return_lse else result

    def run_known(
        self,
        plan: Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Does the same as `run`, without its checks, for a configuration without latent_dim. Tensors that do not fit
        read and write foreign memory.

        The embedded engine calls it for a layer that `run` has checked in an earlier step.
        """
        self._compute(plan, LayerInputs(q, k_cache, v_cache, out, sinks=sinks), out)

    def _compute(self, plan: Plan, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # it cannot follow the kernels' launches
            return run_in_graph(plan.number, inputs, self.config.latent_dim is not None, out)
        return self._backend.run(plan.step, inputs, out)
