"""The models that are trained under a strategy, and their synchronizers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.algorithms.rule import Rule
from tfpara.cluster.call_site import COMPILED_ANEW, Purpose, call
from tfpara.group import Group
from tfpara.keras_model import build_optimizer, hyperparameters, optimizers, tables
from tfpara.steps import reductions
from tfpara.sync.data.balance import Balance
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.notes import Notes
from tfpara.sync.one_sync.replicas import ReplicaVariables, Site
from tfpara.sync.one_sync.statistics import NO_SYNCS, SyncStatistics
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.settings import Settings
from tfpara.sync.start_line import in_words
from tfpara.sync.tensorflow.links import Links
from tfpara.sync.tensorflow.model_variables import check_ftrl, has_schedule, replica_variables
from tfpara.sync.tensorflow.variables import Metric, not_aggregated, plain_variable
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.settings_check import agree
from tfpara.sync.workers.worker import Worker
from tfpara.typing import Nest

_SYNCHRONIZE = call("strategy.synchronize()")
_FORGET = call("strategy.forget()")
_TRAIN = Purpose("beginning to train a model", "train the same models on every worker")


@dataclasses.dataclass(frozen=True, eq=False)
class _Trained:
    """A model that was trained.

    Python collects a model at different times on different workers, so the workers' common
    operations must not depend on whether the model still exists.

    Attributes:
        model: returns the model; None once Python has collected it.
        identity: what `_identity` returned for the model when its synchronizer was made.
        weights: by `id`, the components on the first device of all weights, also of frozen ones.
    """

    model: Callable[[], keras.Model | None]
    identity: Any
    synchronizer: Synchronizer
    weights: Mapping[int, tf.Variable]


class TrainedModels:
    """The models that were trained, in the order of their first steps, the same on all workers.

    Attributes:
        rule: the rule of the model whose synchronizer was made last.
        tracked: the model, or group of models, that `track` has named for a custom loop; else None.
        blocks_closed: how often Python code has closed the blocks; the same on all workers.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        worker: Worker,
        links: Links,
        momentum: MomentumFit,
        notes: Notes,
        balance: Balance | None,
    ) -> None:
        self._strategy, self.settings, self._links = strategy, settings, links
        self._worker, self._call_site, self.company = worker, worker.call_site, worker.company
        self._momentum, self._notes, self._balance = momentum, notes, balance
        self.rule: Rule = settings.rule
        self.tracked: keras.Model | None = None
        self.blocks_closed = 0
        self._trained: list[_Trained] = []
        self._recent: _Trained | None = None  # the entry of the model that was trained last
        self._dropped = NO_SYNCS  # the statistics of models that are not in `_trained` any more
        self._made = 0

    # -- the models ----------------------------------------------------------------------------

    @property
    def has_trained(self) -> bool:
        """Whether a model was trained."""
        return self._made > 0

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """The synchronizers of all trained models, in the order in which they were made."""
        return [trained.synchronizer for trained in list(self._trained)]

    def in_turn(self) -> list[Synchronizer]:
        """Returns all synchronizers; the first is of the model that others may still train."""
        trained = sorted(self._trained, key=lambda each: each is not self._recent)
        return [each.synchronizer for each in trained]

    def statistics(self) -> SyncStatistics:
        """Returns counts and times of this worker's syncs so far, over all models."""
        total = self._dropped
        for synchronizer in self.synchronizers:
            total = total.and_then(synchronizer.graph.statistics())
        return total

    @property
    def steps_seen(self) -> int:
        """The training steps of this process, over all models."""
        of_each = (int(each.graph.block.taken) for each in self.synchronizers)
        return self._dropped.steps + sum(of_each)

    def track(
        self, models: Sequence[keras.Model], given: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Notes that `run` trains these models, with these optimizers beside the compiled ones."""
        if len(models) == 1 and not given and isinstance(models[0], keras.Model):
            self.tracked = models[0]
            return
        former = next((g for g in self._groups() if g.is_of(models, given)), None)
        with self._strategy.scope():
            self.tracked = former or Group(models, given)

    def model_of(self, fn: Callable[..., Nest]) -> keras.Model | None:
        """Returns the model that a function given to `run` trains; None if it is not known."""
        # Keras passes a model's bound method train_step or test_step to run().
        owner = getattr(fn, "__self__", None)
        return owner if isinstance(owner, keras.Model) else self.tracked

    def for_step(self, fn: Callable[..., Nest]) -> Synchronizer | None:
        """Returns the synchronizer of the model whose step `fn` is, as by `_present`."""
        return self._present(self.model_of(fn))

    def synchronizer_of(self, model: keras.Model) -> Synchronizer:
        """Returns the synchronizer of a built and compiled model; makes it if need be."""
        model = self._owner(model)
        return self._present(model) or self.make(model)

    def _present(self, model: keras.Model | None) -> Synchronizer | None:
        """Returns a model's synchronizer; None: it has none for what it is now (`_identity`)."""
        entry = self._entry(model)
        return entry.synchronizer if entry and entry.identity == self._identity(model) else None

    def trained(self, model: keras.Model) -> Synchronizer | None:
        """Returns the synchronizer of a model, or of a trained one that contains it; else None."""
        trained = self._entry_of(model)
        return trained.synchronizer if trained else None

    def is_stranger(self, model: keras.Model) -> bool:
        """Returns whether a model is another strategy's, or shares weights with a trained model."""
        if model.distribute_strategy is not self._strategy:
            return True
        own = list(self._components(model.trainable_variables).values())
        return any(s.has_any_of(own) for s in self.synchronizers)

    def _identity(self, model: keras.Model) -> Any:
        """Returns what a synchronizer depends on; compiling or freezing layers changes it."""
        settings = self.settings
        # If syncs write slots, their number counts, since an optimizer may make them in its first
        # step. Otherwise new slots change nothing: a tf.function that was traced before would go on
        # with the former synchronizer.
        written = settings.slots_at_sync != "keep" or hasattr(settings.rule, "check_optimizer")
        slots = [(each, len(each.variables) if written else 0) for each in optimizers(model)]
        return slots, [id(v) for v in model.trainable_variables]

    def optimizer_built_since(self, model: keras.Model) -> str:
        """Returns the name of an optimizer that has made slots since the synchronizer was made.

        Returns "" if there is none, or if more has changed than slots.
        """
        entry = self._entry(model)
        if entry is None:
            return ""
        (former, weights), (present, own) = entry.identity, self._identity(model)
        if weights != own or [each for each, _ in former] != [each for each, _ in present]:
            return ""
        built = (each for (each, count) in present if (each, count) not in former)
        return next((each.name for each in built), "")

    def _groups(self) -> list[Group]:
        known = [self.tracked, *(trained.model() for trained in self._trained)]
        return [model for model in known if isinstance(model, Group)]

    def _owner(self, model: keras.Model) -> keras.Model:
        """Returns the group in which a model is synchronised with others, or else the model."""
        if self._entry(model) is not None:
            return model
        groups = (g for g in self._groups() if any(member is model for member in g.members))
        return next(groups, model)

    def _entry(self, model: keras.Model | None) -> _Trained | None:
        found = (trained for trained in self._trained if trained.model() is model)
        return None if model is None else next(found, None)

    def _entry_of(self, model: keras.Model) -> _Trained | None:
        """Returns a model's entry, or that of the trained model which has all of its weights."""
        own = self._entry(self._owner(model))
        if own is not None:
            return own
        weights = self._components(model.weights)
        if not weights:
            return None
        wholes = [each for each in self._trained if weights.keys() <= each.weights.keys()]
        # Several trained models may have all of these weights. Then the entry of the model that
        # trains most of the weights is returned.
        return max(
            wholes,
            key=lambda each: sum(each.synchronizer.has_any_of([c]) for c in weights.values()),
            default=None,
        )

    def _components(self, variables: Sequence[keras.Variable]) -> dict[int, tf.Variable]:
        """Returns variables' components on the first device, by id."""
        local_results = self._strategy.experimental_local_results
        return {id(first): first for first in (local_results(v.value)[0] for v in variables)}

    # -- a model is trained, or forgotten --------------------------------------------------------

    @contextlib.contextmanager
    def in_fit(self, model: keras.Model) -> Iterator[None]:
        """A context in which a model's `fit` runs, maybe in a callback of another model's `fit`."""
        entry = self._entry(model)
        if entry is not None and entry.identity != self._identity(model):
            # If layers were frozen or unfrozen, and the model was not compiled anew, the graph of
            # its step still has the syncs of the former weights. So Keras must trace a new graph.
            model.train_function = None
        former = self._recent
        self._recent = self._entry_of(model) or former
        try:
            yield
        finally:
            if self._call_site.fits:
                self._recent = former

    # This method may be called while the tf.function of a custom loop is traced. Without the
    # decorator, AutoGraph would then convert this method and the methods that it calls. One of them
    # closes blocks by a Python loop of syncs. Converted, this loop would fail, because AutoGraph
    # computes a loop's condition in a graph.
    @tf.autograph.experimental.do_not_convert
    def make(self, model: keras.Model | None) -> Synchronizer:
        """Makes a synchronizer for a model, which starts from the model's present weights."""
        if model is None:
            raise ValueError(
                "run() was given a function that updates weights, but not the model "
                "that has the weights. Call strategy.track(model) once before a custom training "
                "loop."
            )
        former = self._entry(model)
        self._drop_collected(former)
        if former is not None:
            self.company.finish_block(former.synchronizer, COMPILED_ANEW)
        # The checks below need a built optimizer, because a MultiOptimizer may have a function that
        # makes the optimizers inside it. It calls this function when it is built.
        build_optimizer(model)
        _refuse(model)
        several = self._worker.replicas > 1 or self.company.changes
        check_ftrl(optimizers(model), self.settings.local_state, several)
        settings = self.settings.for_optimizers(optimizers(model))
        variables = self._agreed_variables(model, settings)
        self._note_settings(model, settings, variables)
        site = self._site()
        others = [each.synchronizer for each in self._trained if each is not former]
        if former is not None:
            trained = {id(v[0]) for v in variables.weights}
            former.synchronizer.leave(lambda each: id(each) not in trained, self._chiefs_left)
        # Weights that are frozen in this model must be equal on all replicas. If another model has
        # trained them, the block of that model is closed, and `leave` makes the weights equal.
        frozen = {id(v[0]) for v in variables.frozen}
        for other in others:
            if other.has_any_of([v[0] for v in variables.frozen]):
                self.company.finish_block(other, _TRAIN)
                other.leave(lambda each: id(each) in frozen, self._chiefs_left)
        synchronizer = Synchronizer(variables, settings, site)
        synchronizer.graph.global_state.rule.change(self._worker.replicas)
        if former is not None:
            synchronizer.graph.adopt(former.synchronizer.graph)
        if any(other.has_any_of([v[0] for v in variables.weights]) for other in others):
            raise ValueError(
                f"model {model.name!r} shares weights with another that was trained under this "
                "strategy; each would keep a global model of them. Call strategy.forget(other) on "
                "every worker if the other one will not be trained any more; else train one model "
                "that has both."
            )
        self.rule = settings.rule
        self._recent = _Trained(
            # This entry keeps a group alive, because the script has no reference to the group.
            (lambda: model) if isinstance(model, Group) else weakref.ref(model),
            self._identity(model),
            synchronizer,
            self._components(model.weights),
        )
        at = len(self._trained) if former is None else self._trained.index(former)
        self._trained[at : at + 1] = [self._recent]
        self.company.check_step()
        return synchronizer

    def _agreed_variables(self, model: keras.Model, settings: Settings) -> ReplicaVariables:
        """Returns a model's variables, once all workers have agreed on their shapes."""
        variables = replica_variables(model, self._strategy.experimental_local_results, settings)
        # The names of layers are left out: they contain numbers that count all layers of a process,
        # and may differ between workers.
        shapes = [
            f"{n.split('/')[-1]} {tuple(v[0].shape)} {v[0].dtype.name}"
            for n, v in zip(variables.weight_names, variables.weights, strict=True)
        ]
        settings_of = {"model": "; ".join(shapes), **hyperparameters(model), **tables(model)}
        agree(settings_of, self._worker.control, _TRAIN)
        return variables

    def _note_settings(
        self, model: keras.Model, settings: Settings, variables: ReplicaVariables
    ) -> None:
        self._momentum.note(model, settings)
        if self._worker.replicas > 1 and "sum" in reductions(getattr(model, "loss", None)):
            self._notes.tell(
                'the loss has reduction="sum". A replica sums over its own minibatch, and the mean '
                "of the replicas counts: 1/N of the sum over all of them, in the step as in the "
                "log. Multiply the learning rate by N, or let the loss be a mean."
            )
        if any(v[0].dtype == tf.float64 for v in (*variables.weights, *variables.state)):
            self._notes.tell(
                "the model has weights of float64, and every sync rounds them to float32, in which "
                "the global model is kept."
            )
        if self.company.changes and any(map(has_schedule, optimizers(model))):
            self._notes.tell(
                "the optimizer has a learning-rate schedule, which counts the steps of one "
                "replica. If workers are lost, the others take more steps in an epoch, and the "
                "schedule ends too early; if workers join, it ends too late. Compile with a number "
                "as the rate, and give fit tfpara.callbacks.LearningRate(schedule, "
                "steps_per_epoch=...), where the schedule counts epochs."
            )
        if settings is not self.settings and settings.rule.has_momentum():
            self._notes.tell(
                "for this local optimizer, which divides by the size of gradients, the rule is "
                f"{in_words(settings.rule)}, in place of the one in the first line."
            )

    def _site(self) -> Site:
        site = Site(
            # The name must be the same on all workers. A worker that joins an elastic run has made
            # fewer synchronizers than the others, so `_made` may differ. But an elastic run trains
            # only one model, so its name needs no number.
            name="model" if self.company.changes else f"model{self._made}",
            num_replicas=self._worker.replicas,
            company=self.company,
            devices=self._worker.devices,
            collectives=self._links.collectives,
            reports=self._links.reports,
            call_site=self._call_site,
            make=plain_variable,
            period=self._momentum.period,
            balance=self._balance,
        )
        self._made += 1
        return site

    def _chiefs_left(self, value: tf.Tensor) -> tf.Tensor:
        return self._worker.control.broadcast(value, "left weights")

    def _drop_collected(self, former: _Trained | None) -> None:
        """Drops the synchronizers of models that no worker has any more, except `former`."""
        if all(each is former for each in self._trained):
            return
        gc.collect()  # models are in reference cycles, so they stay until a collection
        gone = [k for k, each in enumerate(self._trained) if each.model() is None]
        several = self._worker.num_workers > 1
        everyone = everyones(gone, self._worker.control, _TRAIN) if several else [gone]
        of_all = set(gone).intersection(*everyone)
        for entry in [self._trained[k] for k in sorted(of_all)]:
            self._drop(entry, _TRAIN)

    def _drop(self, entry: _Trained, purpose: Purpose) -> None:
        """Closes a model's block and gives up its synchronizer; every worker must call it."""
        synchronizer = entry.synchronizer
        self.company.finish_block(synchronizer, purpose)
        synchronizer.leave(lambda each: True, self._chiefs_left)
        self._dropped = self._dropped.and_then(synchronizer.graph.statistics())
        self._trained.remove(entry)
        if self._recent is entry:
            self._recent = None

    def forget(self, model: keras.Model) -> None:
        """Gives up what is kept of a model; every worker must call it."""
        # The blocks of all models are closed first, not only that of `model`. Other workers may
        # still train another model, and this worker must take part in the syncs of that model until
        # all workers have come to this call.
        self.finish_blocks(_FORGET)
        entry = self._entry_of(model)
        if entry is None:
            return
        self._drop(entry, _FORGET)
        whole = entry.model()
        if whole is not None:
            # The graph of the model's step has the syncs that end here, so Keras must trace a new
            # graph.
            whole.train_function = None
        if self.tracked is whole:
            self.tracked = None

    # -- all models --------------------------------------------------------------------------------

    def finish_blocks(self, purpose: Purpose = _SYNCHRONIZE) -> None:
        """Closes the open blocks of all models; every worker must call it for this purpose."""
        self.blocks_closed += 1
        self.company.finish_blocks(purpose)

    @contextlib.contextmanager
    def writing(self, model: keras.Model) -> Iterator[None]:
        """A context in which a model holds the global weights, for writing it to a file.

        Frozen weights of a trained model are those that it was trained with, whether or not another
        model trains them. If the model itself was not trained, the models with which it shares
        weights hold their global weights.
        """
        own, weights = self._entry(model), self._components(getattr(model, "weights", []))
        sharing = [each for each in self._trained if weights.keys() & each.weights.keys()]
        with contextlib.ExitStack() as stack:
            for trained in sharing if own is None else [own]:
                stack.enter_context(trained.synchronizer.writing(self._notes.tell))
            yield

    def broadcast_replica(self, model: keras.Model, replica: int) -> None:
        """Sets all replicas to the weights and state of one; every worker must call it."""
        if not 0 <= replica < self._worker.replicas:
            raise ValueError(f"replica={replica} is not one of 0 … {self._worker.replicas - 1}.")
        synchronizer = self.synchronizer_of(model)
        # The block is closed before the weights are read, since the closing changes them.
        self.finish_blocks(call("strategy.broadcast_replica()"))
        own = self._worker.replica_ids
        has_it = replica in own
        weights, state = synchronizer.replica_values(own.index(replica) if has_it else 0)
        mine = [tf.reshape(t if has_it else tf.zeros_like(t), [-1]) for t in (*weights, *state)]
        sums = self._worker.control.collectives.all_reduce(mine, "replica")
        values = [tf.reshape(s, t.shape) for s, t in zip(sums, (*weights, *state), strict=True)]
        synchronizer.restart(values[: len(weights)], values[len(weights) :])


def _refuse(model: keras.Model) -> None:
    """Raises ValueError for options and weights of a model that do not work with syncs."""
    if any(getattr(optimizer, "use_ema", False) for optimizer in optimizers(model)):
        raise ValueError(
            "the optimizer has use_ema=True, with which Keras overwrites each replica's weights by "
            'its own average. Use averages={"ema": tfpara.EMA(...)} of the strategy instead.'
        )
    for weight in model.trainable_variables:
        if not weight.value.dtype.is_floating:
            raise ValueError(
                f"the weight {weight.path!r} is of {weight.value.dtype.name}, and a sync averages "
                "floating-point numbers. If training does not change it, make it by "
                "add_weight(trainable=False). Keep complex numbers as two weights, of their real "
                "and imaginary parts."
            )
    for variable in model.metrics_variables:
        if isinstance(variable.value, Metric) and variable.aggregation == "none":
            raise ValueError(not_aggregated(variable.path))
