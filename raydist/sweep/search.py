"""Where Ray Tune's trials come from: the plan's own settings, or a searcher's, each validated as a whole job first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Experiment, Trial
from ray.tune.experiment.config_parser import _create_trial_from_spec, _make_parser
from ray.tune.search.search_algorithm import SearchAlgorithm
from ray.tune.search.searcher import Searcher

from raydist.config_sweep import Options, Range, Tree
from raydist.errors import ConfigError
from raydist.sweep.journal import Journal
from raydist.sweep.space import Plan, Settings, draw, name_of, on_grid
from raydist.task import resolve


class Suggestions(SearchAlgorithm):
    """Ray Tune's search algorithm. First the trials that an interrupted sweep left, then new ones up to the plan's number.

    `limit` says how many may be live now; `spent` whether the budget is used up. The searcher's state is that after all that
    the journal tells, told to it again in the same order.
    """

    def __init__(
        self, plan: Plan, journal: Journal, limit: Callable[[], int], spent: Callable[[], bool], try_job: Callable[..., Any]
    ) -> None:
        self.plan, self.journal, self.limit, self.spent, self.try_job = plan, journal, limit, spent, try_job
        self.searcher = searcher_of(plan)
        self._waiting = sorted(row.number for row in journal.unfinished)
        self._live: set[str] = set()
        self._spec: dict[str, Any] = {}
        self._parser = _make_parser()
        self._metric = plan.sweep.metric
        if self.searcher is not None:
            replay(self.searcher, journal, self._metric)

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune pickles its own objects; a sweep goes on by its journal."""
        return {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """The job file says them."""
        return True

    def add_configurations(self, experiments: Any) -> None:
        """Ray Tune's way to hand over what to run."""
        experiment = experiments[0] if isinstance(experiments, list) else experiments
        assert isinstance(experiment, Experiment)
        self._spec = experiment.spec

    def next_trial(self) -> Trial | None:
        """The next trial; None while enough are live, and when there are no more."""
        while not self.is_finished() and len(self._live) < self.limit():
            if self._waiting:
                return self._trial(self._waiting.pop(0))
            number = len(self.journal.rows)
            settings = self.plan.settings(number) if self.searcher is None else self._suggest(number)
            if settings is None:
                return None
            self.journal.begin(number, settings)
            try:
                self.try_job(number, settings)
            except ConfigError as error:
                self.journal.end(number, "failed", " ".join(str(error).split()))
                if self.searcher is not None:
                    self.searcher.on_trial_complete(name_of(number), error=True)
                continue
            return self._trial(number)
        return None

    def _suggest(self, number: int) -> Settings | None:
        assert self.searcher is not None
        found: Any = self.searcher.suggest(name_of(number))
        if found == Searcher.FINISHED:
            self._finished = True
            return None
        return None if found is None else settings_of(found, self.plan)

    def _trial(self, number: int) -> Trial:
        settings = self.journal.rows[number].settings
        spec = copy.copy(self._spec)
        spec["config"] = copy.deepcopy(settings)
        name = name_of(number)
        self._live.add(name)
        trial: Trial = _create_trial_from_spec(
            spec, self._parser, evaluated_params=dict(settings), experiment_tag=name, trial_id=name
        )
        return trial

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tell the searcher."""
        if self.searcher is not None:
            self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell the searcher; there is room for another trial."""
        self._live.discard(trial_id)
        if self.searcher is not None:
            failed = error or not result or bool(result.get("failed"))
            self.searcher.on_trial_complete(trial_id, None if failed else result, error=failed)

    def is_finished(self) -> bool:
        """Whether no more trials come."""
        if self._finished or self.spent():
            return True
        return not self._waiting and len(self.journal.rows) >= self.plan.trials


# -- searchers -----------------------------------------------------------------------------------------------------------


def searcher_of(plan: Plan) -> Searcher | None:
    """Optuna's, or the one that the job file names; None where the plan itself has all settings. Raises ConfigError."""
    search, sweep = plan.sweep.search, plan.sweep
    seed = plan.config.seed if sweep.seed is None else sweep.seed
    if search.name in ("random", "grid"):
        return None
    if search.name == "optuna":
        try:
            import optuna
        except ImportError:
            raise ConfigError("sweep.search: optuna is not installed: pip install 'raydist[sweep]'") from None
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, warn_independent_sampling=False)
        return OptunaSearch(by_optuna(plan.tree), metric=sweep.metric, mode=sweep.mode, sampler=sampler)
    assert search.target is not None
    kind = resolve(search.target, "sweep.search")
    try:
        found = kind(space=tune_space(plan.tree), metric=sweep.metric, mode=sweep.mode, **search.args)
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"sweep.search: {search.target} cannot be built: {error}") from error
    if not isinstance(found, Searcher):
        raise ConfigError(f"sweep.search: {search.target} gives a {type(found).__name__}, not a ray.tune.search.Searcher")
    return found


def by_optuna(tree: Tree) -> Callable[[Any], None]:
    """The space for Optuna, drawn while it is defined, so that what an option draws is asked for only with that option."""

    def define(trial: Any) -> None:
        draw(tree, picked_by(trial))

    return define


def picked_by(trial: Any) -> Callable[[str, Range | Options], Any]:
    """Draws of Optuna's `trial`."""

    def pick(name: str, node: Range | Options) -> Any:
        if isinstance(node, Options):
            return trial.suggest_categorical(name, list(range(len(node.options))))
        if node.kind == "randint":
            return trial.suggest_int(name, int(node.low), int(node.high) - 1)
        value = trial.suggest_float(name, node.low, node.high, log=node.kind == "loguniform")
        return value if node.step is None else on_grid(value, node)

    return pick


def tune_space(tree: Tree) -> dict[str, Any]:
    """The space in Ray Tune's own words."""
    from ray import tune

    def domain(node: Any) -> Any:
        if isinstance(node, Options):
            return tune.choice(list(node.options))
        if not isinstance(node, Range):
            return node
        if node.kind == "randint":
            return tune.randint(int(node.low), int(node.high))
        if node.step is not None:
            return tune.quniform(node.low, node.high, node.step)
        return (tune.loguniform if node.kind == "loguniform" else tune.uniform)(node.low, node.high)

    return {".".join(key): domain(node) for key, node in tree.nodes}


def settings_of(suggested: dict[str, Any], plan: Plan) -> Settings:
    """Settings out of what a searcher suggests: Optuna's are draws by name, the others' keys by value."""
    if plan.sweep.search.name != "optuna":
        return {key: value.item() if hasattr(value, "item") else value for key, value in suggested.items()}

    def pick(name: str, node: Range | Options) -> Any:
        value = suggested[name]
        return value if isinstance(node, Options) or node.step is None else on_grid(value, node)

    return draw(plan.tree, pick)


def replay(searcher: Searcher, journal: Journal, metric: str) -> None:
    """Bring a new searcher to where the journal ends, by the same calls in the same order."""
    last: dict[int, dict[str, Any]] = {}
    for record in journal.records:
        number, name = int(record["trial"]), name_of(int(record["trial"]))
        if record["kind"] == "begin":
            searcher.suggest(name)
        elif record["kind"] == "report":
            last[number] = row = record["row"]
            if row.get(metric) is not None and not row.get("ended"):
                searcher.on_trial_result(name, {"training_iteration": row["steps"], **row})
        elif record["kind"] == "end":
            failed = record["status"] == "failed" or number not in last
            searcher.on_trial_complete(name, None if failed else last[number], error=failed)
