"""Strategy: one training step, run on all replicas; the common base of all strategies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..base import context, global_batch, nest
from ..base.context import Frame
from ..base.distributed_values import DistributedValues, PerReplica, regroup, select_replica
from ..base.errors import CollectiveMismatchError, explain
from ..base.global_batch import global_batch_size
from ..base.options import CommunicationOptions, RunOptions
from ..base.text import counted
from ..base.types import ReduceOp
from ..cluster.forks import is_child
from ..cluster.resolvers.resolver import ClusterResolver
from ..comm.process_group import ProcessGroup
from ..comm.recorder import RECORDER
from ..cross_device.over_axes import Axis
from ..state.checkpoint import Checkpoint, StrategyState
from ..variables import Variable
from ..variables.equal import different_weights
from .collectives import RankCollectives
from .contexts import Scope, ValueContext
from .extended import StrategyExtended
from .files import Files
from .preemption import StopAgreement, StopRequest, StopTogether
from .tensorflow_names import STRATEGY, OtherNames

if TYPE_CHECKING:
    from mpi4py import MPI

    # loaded by the programs that use them
    from ..data import DistributedDataset, InputContext, InputOptions
    from .input import Distributor, Division

__all__ = ["Strategy"]

S = TypeVar("S", bound="Strategy")

_NO_KWARGS: dict[str, Any] = {}


class Strategy(RankCollectives, Files, OtherNames):
    """The distribution of one training step over replicas (TF: tf.distribute.Strategy). Create one of its subclasses.

    Creating and closing a strategy is collective over its communicator. A `with` statement closes it at the end, unless an
    exception leaves the block; `scope()` makes it the current strategy.

    Attributes:
        cluster_resolver: the tasks of the cluster, if the strategy has a resolver.
    """

    cluster_resolver: ClusterResolver | None = None

    def __init__(self, extended: StrategyExtended | None = None) -> None:
        """Store the inner parts of a subclass. Creating a strategy is collective (see its class).

        Raises:
            TypeError: for Strategy itself.
        """
        if extended is None:
            remedy = "Use MirroredStrategy, MultiWorkerMirroredStrategy, CentralStorageStrategy or OneDeviceStrategy"
            got = "the base class Strategy"
            raise TypeError(explain("Strategy", "", expected="a strategy", got=got, remedy=remedy))
        self._extended = extended
        self._replica_frame: Frame = extended.replicas[0].frame
        self._state = StrategyState(extended.process_group, extended.placement, extended.optimizer_states)
        self._checkpoint = Checkpoint(extended.process_group, self._state)
        self._stop_request = StopRequest(extended.process_group)
        self._stop_agreement: StopAgreement = StopTogether(extended.placement.group)

    # ranks and communicators

    @property
    def extended(self) -> StrategyExtended:
        """The inner parts of the strategy, for optimizers, variables and library authors."""
        return self._extended

    @property
    def rank(self) -> int:
        """This rank's number in the strategy's communicator."""
        return self._extended.topology.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._extended.topology.size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self._extended.topology.local_rank

    @property
    def comm(self) -> MPI.Intracomm | None:
        """The strategy's communicator, a duplicate for the program's own use; None for the default strategy."""
        extended = self._extended
        return extended.topology.comm if extended.closed or extended.topology.closed else extended.process_group.comm

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that step together: of all ranks, or with parameter servers of this worker."""
        return self._extended.sync_topology.num_replicas

    # contexts

    def scope(self) -> Scope:
        """Return the context in which this is the current strategy.

        Variables created inside belong to it. It can be entered again inside itself. Scopes are per thread, and are left in the
        reverse order of entering.

        Raises:
            ContextError: inside another strategy's scope, or in a step.
        """
        self._extended.require_open("Strategy.scope")
        return Scope(self, self._extended.replicas[0].frame if self._extended.is_default else self._extended.frame)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call a step once on each local replica, and return the results. Collective if the step is.

        Several replicas of a rank run in threads, the first on the calling one. In the step, `get_replica_context()` returns
        the replica.

        Args:
            fn: the step.
            args, kwargs: each replica gets its part of any PerReplica or Mirrored in them; variables and other values are
                passed unchanged.
            options: accepted for TF's programs, without effect.

        Returns:
            With one local replica, the step's result. With several, the structure of the results with a PerReplica in each
            place, or the object itself if all returned the same one, unless it is a number.

        Raises:
            Exception: from the first replica that failed; the others stop at their next common call.
            ValueError: args is not a tuple or list; a variable of another strategy among them.
            ContextError: in a step, or in another strategy's scope; or local replicas made different numbers of common calls.

        Example:
            >>> strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)  # doctest: +SKIP
        """
        extended = self._extended
        if extended.closed:
            extended.require_open("Strategy.run")
        context.expect_cross(self, "Strategy.run")
        if type(args) is not tuple or args or kwargs:
            kwargs = self._check_arguments(args, kwargs)
        for observer in context.OBSERVERS:
            observer.run(self, args, kwargs or _NO_KWARGS)
        event = RECORDER.begin(RECORDER.name("r", getattr(fn, "__qualname__", "step")))
        if extended.threads is not None:
            calls = [select_replica(index, (tuple(args), kwargs or {})) for index in range(len(extended.replicas))]
            try:
                return regroup(extended.threads.run(fn, calls), keep_numbers=True)
            except BaseException as error:
                extended.forget_step()
                if isinstance(error, TypeError):
                    _check_call(fn, *calls[0])
                    _check_data(calls[0][0], calls[0][1], error)
                raise
            finally:
                RECORDER.end(event)
        if args or kwargs:
            args, kwargs = select_replica(0, (tuple(args), kwargs))
        token, given = context.push(self._replica_frame), global_batch.begin_step(args, kwargs, extended.batches)
        try:
            return fn(*args, **(kwargs or _NO_KWARGS))
        except BaseException as error:
            extended.forget_step()
            if isinstance(error, TypeError):
                _check_call(fn, args, kwargs or _NO_KWARGS)
                _check_data(args, kwargs or _NO_KWARGS, error)
            raise
        finally:
            global_batch.end_step(given)
            context.pop(token)
            RECORDER.end(event)

    def _check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        if not isinstance(args, (tuple, list)):
            remedy = "Write args=(x,) for one argument"
            got = f"a {type(args).__name__}"
            raise ValueError(explain("Strategy.run", "args", expected="a tuple or list", got=got, remedy=remedy))
        kwargs = dict(kwargs or {})
        replicas = len(self._extended.replicas)
        for leaf in nest.flatten((args, kwargs)):
            if isinstance(leaf, Variable):
                self._extended.require_own(leaf, "Strategy.run")
            elif isinstance(leaf, DistributedValues) and len(leaf.values) != replicas:
                expected = f"one value for each of the {replicas} local replicas"
                raise ValueError(explain("Strategy.run", "args", expected=expected, got=f"{len(leaf.values)}"))
        return kwargs

    def should_stop(self) -> bool:
        """Return whether to stop here: a rank got SIGUSR1 or SIGTERM, or its time is nearly over. Collective.

        Call it after each step, and after the loop over a dataset. The answer is the same on every rank. It becomes True at the
        second call after a rank got the signal, and stays True. No rank waits in it. A program that stops saves its state, and
        exits with the status `ms.RESTART_EXIT_CODE`: see "Preemption".

        With parameter servers each worker stops at its own step, some tenths of a second after the signal, and in the loop over
        a dataset the call is not collective. After the loop all ranks call it, the servers too, and get the same answer. In a
        coordinator's program only the coordinator calls it.

        After the first call the two signals have no other effect: see `ms.catch_stop_signals`. The time limit is SLURM's, or
        MPISTRAT_END_TIME; the request comes earlier by the time of the longest save so far.

        Raises:
            ContextError: in a step.

        Example:
            >>> with ms.OneDeviceStrategy() as strategy:
            ...     strategy.should_stop()
            False
        """
        self._extended.require_cross("Strategy.should_stop")
        self._stop_request.save_seconds = self._checkpoint.seconds
        return self._stop_agreement.ask(bool(self._stop_request))

    # local steps

    @property
    def nodes_differ(self) -> bool:
        """True if nodes have taken local steps since the last outer step (`local_steps`): their weights differ then."""
        return bool(self._extended.placement.apart)

    def outer_step(self) -> None:
        """Take the outer step now, if nodes have taken local ones since the last: then all have equal weights. Collective.

        Call it at the end of training, and before uses of all nodes' weights: `save`, `assign`, the evaluation of one model. A
        shortened round counts as any other. Without `local_steps` it has no effect.

        Raises:
            ContextError: in a step.

        Example:
            >>> with ms.OneDeviceStrategy() as strategy:
            ...     strategy.outer_step()
            ...     strategy.nodes_differ
            False
        """
        self._extended.require_cross("Strategy.outer_step")
        for optimizer in self._extended.optimizers if self.nodes_differ else ():
            optimizer._core.take_outer_step()

    # values

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Axis = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the sum, or another reduction, of a value over all replicas, equal on every rank. Collective.

        Without an axis the replicas' arrays, of one shape, are combined element by element; MEAN divides by the number of
        replicas. With an axis, elements along it are combined too: MEAN is the sum of all elements divided by their number,
        which may differ between replicas or be 0. Integers give a float64 MEAN. MIN, MAX and PROD (not in TF) keep the dtype;
        without elements PROD is 1, as SUM is 0. Of bools MIN is True if all are, and MAX if any is.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: a result of `run`: PerReplica or plain arrays or numbers, or a nest of them. Of an ON_READ variable the
                replicas' copies are combined.
            axis: None, an axis, or several; negative ones count from the end.
            options: bytes_per_pack, timeout_seconds, implementation of this call.

        Returns:
            A new array, a NumPy scalar for no dimensions, or the nest of them. One collective for all.

        Raises:
            ValueError: another reduce_op; an axis out of range; a MEAN, MIN or MAX without elements; a plain value under SUM or
                PROD on a rank with several replicas; a Mirrored or an ON_WRITE variable under SUM or PROD.
            TypeError: bool under SUM, MEAN or PROD; complex numbers or IndexedSlices under MIN, MAX or PROD.
            CollectiveMismatchError: on every rank: ranks pass different operations, shapes or dtypes.
            ContextError: in a step: use `get_replica_context().all_reduce`.

        Example:
            >>> float(ms.get_strategy().reduce("MEAN", np.array([1.0, 2.0, 6.0]), axis=0))
            3.0
        """
        extended = self._extended
        if extended.closed:
            extended.require_open("Strategy.reduce")
        context.expect_cross(self, "Strategy.reduce")
        return extended.collectives.all_reduce(
            reduce_op, extended.copies_of_variables(value), axis=axis, options=options
        )

    def gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Return the replicas' arrays concatenated along an axis, in replica order, equal on every rank. Collective.

        Args:
            value: PerReplica or plain arrays, or a nest of them; lengths along `axis` may differ.
            axis: from 0, or from the end if it is negative.
            options: as for `reduce`.

        Raises:
            CollectiveMismatchError: anything but the length along `axis` differs.
            ValueError: a scalar, or an axis out of range.
            ContextError: in a step: use `get_replica_context().all_gather`.
        """
        extended = self._extended
        extended.require_cross("Strategy.gather")
        return extended.collectives.all_gather(extended.copies_of_variables(value), axis=axis, options=options)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return each local replica's part of a value, in replica order; (value,) for a plain one.

        Of a nest, each replica's nest is returned.
        """
        if isinstance(value, (DistributedValues, Variable)):
            return tuple(value.values)
        if nest.is_nested(value):
            return tuple(select_replica(index, value) for index in range(len(self._extended.replicas)))
        return (value,)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return PerReplica values from a function that is called once for each local replica.

        Args:
            value_fn: gets a ValueContext, and returns a value or a nest.
        """
        context.expect_cross(self, "Strategy.distribute_values_from_function")
        topology = self._extended.sync_topology
        ids = range(topology.replica_offset, topology.replica_offset + topology.num_local_replicas)
        made = [value_fn(ValueContext(i, topology.num_replicas)) for i in ids]
        return nest.map_structure(lambda *leaves: PerReplica(leaves), *made)

    # input

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Return a batched dataset divided over all replicas, by the policy of its options. Collective.

        AUTO and DATA cut each batch, also a smaller last one, into contiguous blocks, one per replica in the order of their
        ids, whose sizes differ by at most one. The order of the samples is the same for any number of replicas. The other
        policies: see "Input" in the guide.

        Args:
            dataset: the same on every rank; its batches are global: those of all replicas together. A tf.data.Dataset is
                divided as tf.distribute divides it: by files, or else by batches, after its auto_shard_policy; its iterators
                cannot be restored in the middle of an epoch.
            options: where batches go and how many are read ahead; PER_WORKER only.

        Raises:
            ValueError: the dataset is not batched, or does not meet its policy's needs.
            ShardError: on every rank: a shard cannot be opened or does not match on some rank.
            CollectiveMismatchError: on every rank: their datasets differ.

        Example:
            >>> rows = ms.data.from_arrays(np.arange(5)).batch(4)
            >>> data = ms.get_strategy().distribute_dataset(rows)
            >>> [batch.tolist() for batch in data]
            [[0, 1, 2, 3], [4]]
        """
        self._extended.require_cross("Strategy.distribute_dataset")
        return self._distributor(options).of_dataset(dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return a dataset that each rank creates itself, in step with the others'. Collective.

        Each step takes one element for every local replica. A rank without one takes part with zero rows until no rank has any.
        Iterating is collective. If all ranks create Datasets with random access, the first step and every 64th start with one
        small sum over the ranks, and `len` returns the number of steps; otherwise each step does.

        Args:
            dataset_fn: gets an InputContext; returns an iterable of batches, each for one replica. It is called once, or once
                for each local replica under InputReplicationMode.PER_REPLICA.
            options: where batches go, how many are read ahead, and the replication mode.

        Raises:
            TypeError, ValueError: on every rank: the function returns no iterable of batches on some rank.
        """
        self._extended.require_cross("Strategy.distribute_datasets_from_function")
        return self._distributor(options).from_function(dataset_fn)

    def batch(self, element: Any) -> AbstractContextManager[None]:
        """Return a context in which passes belong to a batch: their gradients are weighted by its rows here.

        Only needed if replicas have unequal parts of batches and a pass does not show its batch: no input has the memory of a
        batch, or as many rows. See "What a batch weighs" in the guide. Local.

        Args:
            element: an array of the distributed dataset's batch, a part of it, or the batch. None for rows of no distributed
                dataset: all replicas then have equal weights.

        Raises:
            BatchError: the batch is unknown.

        Example:
            >>> strategy = ms.get_strategy()
            >>> data = ms.data.from_arrays(np.arange(5.0)).batch(4)
            >>> for rows in strategy.distribute_dataset(data):
            ...     with strategy.batch(rows):
            ...         step(np.diff(rows))  # doctest: +SKIP
        """
        return global_batch.named(self._extended.batches, element)

    def _distributor(self, options: InputOptions | None) -> Distributor:
        from .input import Distributor

        return Distributor(self._readers(), self._division(), options, self._extended.batches)

    def _readers(self) -> ProcessGroup:
        """Return the ranks that create a dataset together: in a coordinator's function only this one."""
        extended = self._extended
        return extended.placement.group if extended.coordination.scheduled else extended.process_group

    def _division(self) -> Division:
        """Return this rank's part in reading."""
        from .input import Division

        return Division.together(self._extended.process_group)

    # lifetime

    def describe(self) -> list[tuple[str, str]]:
        """Return further rows of `show_config`, as names and texts."""
        return []

    def close(self) -> None:
        """Free variables, shared memory, threads and communicators. Collective the first time; later calls have no effect.

        Afterwards the strategy and its variables raise ClosedError. A deep copy shares its communicators: closing the copy
        leaves them open, closing the original frees both. In a process forked by a rank it has no effect.

        Raises:
            CollectiveMismatchError: on every rank, after closing: weights that should be equal differ between nodes, or between
                the ranks of a mesh's replica, and no error has reported it before.
        """
        if is_child():
            return
        difference = None
        if not self._extended.closed:
            self._checkpoint.end()
            self._checkpoint.end_runs()
            difference = self._difference_at_end()
        self._extended.close()
        self._stop_request.close()
        if difference is not None:
            raise difference

    def _difference_at_end(self) -> CollectiveMismatchError | None:
        """Return the error of weights that differ; None if it is known, or ranks cannot communicate. Collective."""
        placement = self._extended.placement
        groups = [placement.group, placement.creators, *([placement.replica] if placement.replica else [])]
        if placement.told_apart or placement.apart or not all(group.healthy for group in groups):
            return None
        return different_weights("Strategy.close", placement)

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an exception the other ranks do not come, and this one would wait
            self.close()

    def __copy__(self) -> NoReturn:
        remedy = "A deep copy shares the communicators"
        raise RuntimeError(explain(type(self).__name__, "", expected="copy.deepcopy", got="copy.copy", remedy=remedy))

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.cluster_resolver = self.cluster_resolver
        Strategy.__init__(other, self._extended.share_with(other))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(explain(type(self).__name__, "", expected="no pickling", got="a pickle"))

    def __repr__(self) -> str:
        topology = self._extended.topology
        state = "closed" if self._extended.closed else f"{topology.num_replicas} replicas on {topology.size} ranks"
        return f"<{type(self).__name__} {state}, {counted(topology.num_nodes, 'node')}>"

    _other_names = STRATEGY


def _check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a step does not take the arguments of `run`: a batch is one argument, or several."""
    if not callable(fn):
        got = f"{type(fn).__name__} {fn!r}"
        raise TypeError(explain("Strategy.run", "fn", expected="a function: the step", got=got)) from None
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as mismatch:
        name = getattr(fn, "__name__", type(fn).__name__)
        remedy = "args=(batch,) passes a batch as one argument, args=batch its elements as several"
        got = f"{len(args)} in args and {len(kwargs)} in kwargs ({mismatch})"
        expected = f"the arguments that {name}{inspect.signature(fn)} takes"
        raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from None
    except ValueError:  # written in C, without a signature
        pass


def _check_data(args: Sequence[Any], kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise TypeError if a step fails on text instead of numbers, or on a batch of no distributed dataset."""
    given = {"args": args, "kwargs": dict(kwargs)}
    numpys = type(error).__module__.startswith("numpy")
    for path, leaf in zip(nest.paths(given), nest.flatten(given), strict=True):
        dtype = getattr(leaf, "dtype", None)
        if numpys and getattr(dtype, "kind", " ") in "USTO":
            place = path.replace("['", "", 1).replace("']", "", 1)
            expected, got = "numbers in the computation of the step", f"text or objects ({dtype}) in {place}: {error}"
            remedy = "Make numbers of text before batch: names, numbers = np.unique(labels, return_inverse=True)"
            raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from error
    if "NoneType" in str(error) and given["args"] and global_batch_size() is None:
        expected = "a batch of a distributed dataset, which sets ms.context.global_batch_size()"
        got = f"None for it, and the step failed: {error}"
        remedy = "Loop over strategy.distribute_dataset(dataset), or call ms.context.set_global_batch_size(rows)"
        raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from error
