"""Keras callbacks that decide by scores on held-out data: Newbob and the overfitting guard."""

from __future__ import annotations

import keras

from tfpara.callbacks.held_out import HeldOut
from tfpara.callbacks.schedule import Schedule, learning_rate
from tfpara.schedules import NewbobRule, OverfittingRule
from tfpara.sync.keras.training_state import EpochStart
from tfpara.typing import Data, Logs


class _ByScores(Schedule):
    """A schedule that follows a rule on scores."""

    @property
    def stopped(self) -> bool:
        """Whether the rule has ended training; also true after resuming such a run."""
        return self._state.stopped


class Newbob(_ByScores):
    """Lowers the learning rate, and stops training, by a score on held-out data after each epoch.

    The rate stays while the score improves enough. Then it is halved after every epoch, and
    training stops when the score hardly improves any more. `tfpara.schedules.NewbobRule` has the
    thresholds of the papers. This callback replaces a `HeldOut`: it adds the scores to the epoch's
    log in the same way.

    Args:
        validation: held-out data in any form that `HeldOut` takes. Or the name of a score in the
            epoch's log, such as "validation_loss" of a `HeldOut`; then `metric`, `which` and `name`
            only apply to the score of `initial`.
        metric: "loss" or the name of a compiled metric.
        rule: the thresholds. None: `NewbobRule.cross_entropy()` for a loss and
            `NewbobRule.accuracy()` for an accuracy.
        which: the weights to score: "global", "local" or an average's name.
        name: prefix of the results in the log.
        score_first: whether the model is also scored before the run's first epoch, as in Kaldi's
            nnet1 schedule, so that the first epoch is compared with the initial model.
        initial: the data for the score before the first epoch, if `validation` is a name; `metric`
            and `name` must give the score this name. None: no score before the first epoch.
        verbose: 1: the chief prints a line for each change; 0: none.

    With ``reject_worse`` in the rule, an epoch without a better score is discarded. Everything but
    the learning rate returns, on every replica, to its value at the start of the epoch, or where
    training was resumed or joined within the epoch.

    Raises:
        TypeError: the optimizer has a learning-rate schedule.
        ValueError: there is no `rule`, and the score is neither a loss nor an accuracy; or the log
            has no such score, or it is not finite.
    """

    def __init__(
        self,
        validation: str | Data,
        metric: str = "loss",
        *,
        rule: NewbobRule | None = None,
        which: str = "global",
        name: str = "validation",
        score_first: bool = True,
        initial: Data = None,
        verbose: int = 1,
    ) -> None:
        super().__init__("newbob", verbose, sets_rate=True)
        named = isinstance(validation, str)
        self._key = validation if named else f"{name}_{metric}"
        self._rule = rule or _rule_for(self._key)
        self._state = self._rule.init()
        self._start: EpochStart | None = None
        self._held_out = None if named else HeldOut(validation, which, name)
        self._first = self._held_out if score_first else None
        if named and initial is not None:
            self._first = HeldOut(initial, which, name)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for scores in (self._held_out, self._first):
            if scores is not None:
                scores.set_model(model)
        self._start = EpochStart(model) if self._rule.reject_worse else None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self._first is not None and self._state.score is None:
            scores: Logs = {}
            self._first.on_epoch_end(-1, scores)
            self._state = self._rule.update(self._state, _entry(scores, self._key))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self._start is not None:
            self._start.note()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = {} if logs is None else logs
        if self._held_out is not None:
            self._held_out.on_epoch_end(epoch, logs)
        super().on_epoch_end(epoch, logs)
        self._state = self._rule.update(self._state, _entry(logs, self._key))
        if self._start is not None:
            if self._state.rejected:
                self._start.go_back()
            self._start.forget()
        self._act(epoch)

    def _act(self, epoch: int) -> None:
        state, rule = self._state, self._rule
        unit = 100.0 if rule.relative or rule.rising else 1.0
        percent = "%" if unit == 100.0 else ""
        change = f"{self._key} gained {unit * (state.gain or 0.0):.3g}{percent}"
        if state.rejected:
            change += "; went back to where this epoch began"
        if state.stopped:
            self.model.stop_training = True
            self.say(epoch, f"{change}, less than {unit * rule.stop:g}{percent}: stops.")
        elif state.fading:
            rate = learning_rate(self.model) * rule.factor
            self.model.optimizer.learning_rate = rate
            self.say(epoch, f"{change}; learning rate {rate:.4g}.")


class OverfittingGuard(_ByScores):
    """Stops training when the gap between training and validation error has become too large.

    `tfpara.schedules.OverfittingRule` is the rule. `HeldOut` always runs before this callback.
    If `Newbob` or another callback scores the validation data, put this callback after it.

    Args:
        training: entry of the epoch's log for the training data, such as "accuracy", which is a
            mean over the epoch. To compare errors of the same weights, add
            `HeldOut(part_of_training_data, name="training")`, and give "training_accuracy" here.
        validation: entry for the validation data.
        rule: threshold and patience.
        verbose: 1: the chief prints a line when it stops; 0: none.

    If the name of an entry ends in "accuracy", the error is 1 − accuracy. Other entries are errors.

    Raises:
        ValueError: one entry is an accuracy and the other is not; an entry is missing or not
            finite.
    """

    def __init__(
        self,
        training: str = "accuracy",
        validation: str = "validation_accuracy",
        rule: OverfittingRule | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__("overfitting_guard", verbose, sets_rate=False)
        if _is_accuracy(training) != _is_accuracy(validation):
            raise ValueError(
                f"training={training!r} and validation={validation!r}: one is an accuracy and the "
                "other is not. Give the same measure of both."
            )
        self._keys = (training, validation)
        self._rule = rule or OverfittingRule()
        self._state = self._rule.init()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        training, validation = (self._error(logs or {}, key) for key in self._keys)
        self._state = self._rule.update(self._state, training, validation)
        if self._state.stopped:
            self.model.stop_training = True
            self.say(
                epoch,
                f"training error {training:.4g}, validation error {validation:.4g}: a gap of more "
                f"than {self._rule.threshold:g} over the smallest; stops.",
            )

    @staticmethod
    def _error(logs: Logs, key: str) -> float:
        value = _entry(logs, key)
        return 1.0 - value if _is_accuracy(key) else value


def _rule_for(key: str) -> NewbobRule:
    if _is_accuracy(key):
        return NewbobRule.accuracy()
    if key.endswith("loss"):
        return NewbobRule.cross_entropy()
    raise ValueError(
        f"Newbob cannot tell from the name {key!r} whether higher is better. Give "
        "rule=tfpara.schedules.NewbobRule(...)."
    )


def _is_accuracy(key: str) -> bool:
    return key.endswith(("accuracy", "acc"))


def _entry(logs: Logs, key: str) -> float:
    if key not in logs:
        raise ValueError(
            f"the epoch's log has no {key!r}. It has: {', '.join(sorted(logs))}. Callbacks that "
            "write to it must come before those that read."
        )
    return float(logs[key])
