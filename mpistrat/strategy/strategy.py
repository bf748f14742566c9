"""Strategy: one training step, run on all replicas. What all strategies have in common, which is nearly everything."""

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
    from ..data import Dataset, DistributedDataset, InputContext, InputOptions
    from .input import Distributor, Division

__all__ = ["Strategy"]

S = TypeVar("S", bound="Strategy")

_NO_KWARGS: dict[str, Any] = {}


class Strategy(RankCollectives, Files, OtherNames):
    """How one training step runs on many replicas (TF: tf.distribute.Strategy). Make one of its subclasses.

    Creating and closing a strategy is collective over its communicator. Used in a `with` statement it is closed at the
    end, unless an exception leaves it; `scope()` is what makes it the current strategy.

    Attributes:
        cluster_resolver: who the tasks of the cluster are, where the strategy was told.
    """

    cluster_resolver: ClusterResolver | None = None

    def __init__(self, extended: StrategyExtended | None = None) -> None:
        """Hold the inner parts that a subclass made. Making a strategy is collective (see its class).

        Raises:
            TypeError: for Strategy itself.
        """
        if extended is None:
            remedy = "MirroredStrategy, MultiWorkerMirroredStrategy, CentralStorageStrategy and OneDeviceStrategy are"
            got = "Strategy, which is none by itself"
            raise TypeError(explain("Strategy", "", expected="a strategy", got=got, remedy=remedy))
        self._extended = extended
        self._replica_frame: Frame = extended.replicas[0].frame
        self._state = StrategyState(extended.process_group, extended.placement, extended.optimizer_states)
        self._checkpoint = Checkpoint(extended.process_group, self._state)
        self._stop_request = StopRequest(extended.process_group)
        self._stop_agreement: StopAgreement = StopTogether(extended.placement.group)

    # who and where

    @property
    def extended(self) -> StrategyExtended:
        """What optimizers, variables and library authors need of a strategy."""
        return self._extended

    @property
    def rank(self) -> int:
        """This rank's number in the strategy's communicator."""
        return self._extended.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
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
        """Number of replicas that step together: of all ranks, or with parameter servers of this worker."""
        return self._extended.sync_topology.num_replicas

    # contexts

    def scope(self) -> Scope:
        """Return the context in which this is the current strategy.

        Variables made inside belong to it. It may be entered again inside itself; scopes hold for one thread and are
        left in the reverse order of entering.

        Raises:
            ContextError: when entered inside another strategy's scope, or in a step.
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
        """Call a step once on each local replica, and return what they return. Collective where the step is.

        Several replicas of a rank run in threads, the first on the calling one. In the step `get_replica_context()`
        tells which replica it is.

        Args:
            fn: the step.
            args, kwargs: of a PerReplica or Mirrored anywhere in them each replica gets its own part; variables and
                everything else are passed as they are.
            options: accepted for TF's programs, without effect.

        Returns:
            With one local replica, what the step returned. With several, the structure that they returned with a
            PerReplica in each place, or the object itself where all returned the same one, unless it is a number.

        Raises:
            Exception: what the first replica that failed raised; the others are stopped where they next act together.
            ValueError: args are no tuple or list; a variable of another strategy among them.
            ContextError: in a step, or in another strategy's scope; or local replicas acted together unequally often.

        Example:
            >>> strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)  # doctest: +SKIP
        """
        extended = self._extended
        if extended.closed:
            extended.require_open("Strategy.run")
        context.expect_cross(self, "Strategy.run")
        if type(args) is not tuple or args or kwargs:
            kwargs = self._check_arguments(args, kwargs)
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
        """Return whether to stop here: some rank got SIGUSR1 or SIGTERM, or its time is nearly over. Collective.

        Call it after each step, and after the loop over a dataset. The answer is the same on every rank, whichever rank was
        told, and comes at the second call after that; once True, it stays so. No rank waits for another in it. A program that
        stops saves what it needs to go on, and ends with the exit status `ms.RESTART_EXIT_CODE`: see "Preemption".

        With parameter servers each worker stops at its own step, some tenths of a second after the rank that was told, and in
        the loop over a dataset the call is not collective. After it all ranks call it, the servers too, and get one answer, so
        that all go on or save together. In a coordinator's program the coordinator calls it, alone.

        From the first call on the two signals do nothing else: see `ms.catch_stop_signals`. The time limit is SLURM's, or
        what MPISTRAT_END_TIME says, and comes as much earlier as the longest save so far has taken.

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
        """Whether nodes have taken local steps since the last outer step (`local_steps`): each has weights of its own then."""
        return bool(self._extended.placement.apart)

    def outer_step(self) -> None:
        """Take the outer step now, if nodes have taken local ones since the last: all have the same weights then. Collective.

        For the end of training, and before what needs weights of all nodes: `save`, `assign`, an evaluation of one model. A round
        that it cuts short is a round like any other. Without `local_steps` nothing happens.

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

        Without an axis the replicas' arrays, which have one shape, are combined element by element; MEAN divides by the
        number of replicas. With an axis, elements along it are combined too: MEAN is the sum of all elements divided by
        their number, whatever each replica has of them, and a replica may have none. Integers give a float64 MEAN.
        MIN, MAX and PROD (TF has none of them) keep the dtype; of no element at all PROD is 1, as SUM is 0.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: what `run` returned: PerReplica or plain arrays or numbers, or a nest of them. Of an ON_READ variable
                the replicas' copies are combined.
            axis: None, an axis, or several; negative ones count from the end.
            options: bytes_per_pack, timeout_seconds, implementation of this call.

        Returns:
            A new array, a NumPy scalar for no dimensions, or the nest of them. One collective for all.

        Raises:
            ValueError: another reduce_op; an axis out of range; a MEAN, MIN or MAX of no element at all; a plain value
                under SUM or PROD on a rank with several replicas; a Mirrored or an ON_WRITE variable under SUM or PROD.
            TypeError: bool; complex numbers or IndexedSlices under MIN, MAX or PROD.
            CollectiveMismatchError: on every rank, when they pass different operations, shapes or dtypes.
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
            CollectiveMismatchError: something else than the length along `axis` differs.
            ValueError: a scalar, or an axis out of range.
            ContextError: in a step: use `get_replica_context().all_gather`.
        """
        extended = self._extended
        extended.require_cross("Strategy.gather")
        return extended.collectives.all_gather(extended.copies_of_variables(value), axis=axis, options=options)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what each local replica has of a value, in replica order; (value,) of a plain one.

        Of a nest, each replica's nest is returned.
        """
        if isinstance(value, (DistributedValues, Variable)):
            return tuple(value.values)
        if nest.is_nested(value):
            return tuple(select_replica(index, value) for index in range(len(self._extended.replicas)))
        return (value,)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return PerReplica values that a function makes, called once for each local replica.

        Args:
            value_fn: gets a ValueContext, and returns a value or a nest.
        """
        context.expect_cross(self, "Strategy.distribute_values_from_function")
        topology = self._extended.sync_topology
        ids = range(topology.replica_offset, topology.replica_offset + topology.num_local_replicas)
        made = [value_fn(ValueContext(i, topology.num_replicas)) for i in ids]
        return nest.map_structure(lambda *leaves: PerReplica(leaves), *made)

    # input

    def distribute_dataset(self, dataset: Dataset, options: InputOptions | None = None) -> DistributedDataset:
        """Return a batched dataset divided over all replicas, by the policy of its options. Collective.

        AUTO and DATA cut each batch into contiguous blocks, one a replica in the order of their ids, whose sizes differ
        by at most one; so is a smaller last batch. The order of the samples is the same for any number of replicas.
        The other policies: see "Input" in the guide.

        Args:
            dataset: the same on every rank; its batches are global: those of all replicas together.
            options: where batches go and how many are read ahead; PER_WORKER only.

        Raises:
            ValueError: the dataset is not batched, or has not what its policy needs.
            ShardError: on every rank, when a shard cannot be opened or does not match on any.
            CollectiveMismatchError: on every rank, when their datasets differ.

        Example:
            >>> data = ms.get_strategy().distribute_dataset(ms.data.from_arrays(np.arange(5)).batch(4))
            >>> [batch.tolist() for batch in data]
            [[0, 1, 2, 3], [4]]
        """
        self._extended.require_cross("Strategy.distribute_dataset")
        return self._distributor(options).of_dataset(dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return the dataset that each rank makes for itself, stepping together with the others'. Collective.

        Each step takes one element for every local replica. A rank without one left takes part with zero rows until
        no rank has any. Iterating is collective. Where all ranks make Datasets with random access, the first step and
        every 64th begin with one small sum over the ranks, and `len` tells the number of steps; else each step does.

        Args:
            dataset_fn: gets an InputContext; returns an iterable of batches, each for one replica. It is called once,
                or once for each local replica under InputReplicationMode.PER_REPLICA.
            options: where batches go, how many are read ahead, and the replication mode.

        Raises:
            TypeError, ValueError: on every rank, when the function returns no iterable of batches on any.
        """
        self._extended.require_cross("Strategy.distribute_datasets_from_function")
        return self._distributor(options).from_function(dataset_fn)

    def batch(self, element: Any) -> AbstractContextManager[None]:
        """Let the passes in a `with` block belong to a batch: their gradients are weighted by its rows here.

        Only needed where replicas have unequal parts of batches and a pass does not show which batch it is of: no input has the
        memory of a batch, or as many rows. See "What a batch weighs" in the guide. Local.

        Args:
            element: an array of the batch, as the distributed dataset handed it out, a part of it, or the batch. None if the
                rows are of no distributed dataset: then all replicas weigh equally.

        Raises:
            BatchError: the batch is unknown.

        Example:
            >>> strategy = ms.get_strategy()
            >>> for rows in strategy.distribute_dataset(ms.data.from_arrays(np.arange(5.0)).batch(4)):
            ...     with strategy.batch(rows):
            ...         step(np.diff(rows))  # doctest: +SKIP
        """
        return global_batch.named(self._extended.batches, element)

    def _distributor(self, options: InputOptions | None) -> Distributor:
        from .input import Distributor

        return Distributor(self._readers(), self._division(), options, self._extended.batches)

    def _readers(self) -> ProcessGroup:
        """The ranks that make a dataset together: in a function of a coordinator this one alone."""
        extended = self._extended
        return extended.placement.group if extended.coordination.scheduled else extended.process_group

    def _division(self) -> Division:
        """How this rank takes part in reading."""
        from .input import Division

        return Division.together(self._extended.process_group)

    # its life

    def describe(self) -> list[tuple[str, str]]:
        """Return what else `show_config` shows of it, as names and texts."""
        return []

    def close(self) -> None:
        """Free variables, shared memory, threads and communicators. Collective the first time; then it does nothing.

        Afterwards the strategy and its variables raise ClosedError. A deep copy of it shares its communicators: closing
        the copy leaves them open, closing the original ends both. In a process that a rank has forked it does nothing.

        Raises:
            CollectiveMismatchError: on every rank, after it was closed: weights that should be equal differ between nodes, or
                between the ranks of a mesh's replica, and no error has said so before.
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
        """Return the error of weights that differ; None where it is known, or ranks cannot meet. Collective."""
        placement = self._extended.placement
        groups = [placement.group, *([] if placement.grid is None else [placement.grid.replica, placement.grid.world])]
        if placement.told_apart or placement.apart or not all(group.healthy for group in groups):
            return None
        return different_weights("Strategy.close", placement)

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # the other ranks do not know of an exception here, and would be waited for
            self.close()

    def __copy__(self) -> NoReturn:
        remedy = "copy.deepcopy gives a strategy that shares the communicators"
        raise RuntimeError(explain(type(self).__name__, "", expected="no copy.copy", got="one", remedy=remedy))

    def __deepcopy__(self: S, memo: dict[int, Any]) -> S:
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.cluster_resolver = self.cluster_resolver
        Strategy.__init__(other, self._extended.share_with(other))
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(explain(type(self).__name__, "", expected="no pickling", got="an attempt"))

    def __repr__(self) -> str:
        topology = self._extended.topology
        state = "closed" if self._extended.closed else f"{topology.num_replicas} replicas on {topology.size} ranks"
        return f"<{type(self).__name__} {state}, {counted(topology.num_nodes, 'node')}>"

    _other_names = STRATEGY


def _check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what is wrong if a step does not take the arguments of `run`: a batch is one argument, or several."""
    if not callable(fn):
        got = f"{type(fn).__name__} {fn!r}"
        raise TypeError(explain("Strategy.run", "fn", expected="a function: the step", got=got)) from None
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as mismatch:
        name = getattr(fn, "__name__", type(fn).__name__)
        remedy = "args=(batch,) hands over a batch as one argument, args=batch its parts as several"
        got = f"{len(args)} in args and {len(kwargs)} in kwargs ({mismatch})"
        expected = f"the arguments that {name}{inspect.signature(fn)} takes"
        raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from None
    except ValueError:  # written in C, without a signature
        pass


def _check_data(args: Sequence[Any], kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise what is wrong if a step fails on text where numbers belong, or on a batch that no distributed dataset gave."""
    given = {"args": args, "kwargs": dict(kwargs)}
    numpys = type(error).__module__.startswith("numpy")
    for path, leaf in zip(nest.paths(given), nest.flatten(given), strict=True):
        dtype = getattr(leaf, "dtype", None)
        if numpys and getattr(dtype, "kind", " ") in "USTO":
            place = path.replace("['", "", 1).replace("']", "", 1)
            expected, got = "numbers in what the step computes with", f"text or objects ({dtype}) in {place}: {error}"
            remedy = "Make numbers of text before batch: names, numbers = np.unique(labels, return_inverse=True)"
            raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from error
    if "NoneType" in str(error) and given["args"] and global_batch_size() is None:
        expected = "a batch of a distributed dataset, which tells ms.context.global_batch_size()"
        got = f"another, so that it is None, and the step failed: {error}"
        remedy = "Loop over strategy.distribute_dataset(dataset), or tell it: ms.context.set_global_batch_size(rows)"
        raise TypeError(explain("Strategy.run", "args", expected=expected, got=got, remedy=remedy)) from error
