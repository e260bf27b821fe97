"""The reward of a configuration, from the function that the user gives."""

import hashlib
from dataclasses import replace

from tezo.errors import RequestError
from tezo.models.model_config import IN_MEMORY
from tezo.tasks.rewards import Reward, Score, load_score, name_of
from tezo.training.configuration.recipe import REWARD, Config, TrainConfig


def make_reward(config: Config, given: Score | None = None) -> Reward | None:
    """The reward that a configuration maximises; None: it has another objective.

    Args:
        config: of a run. Its train.reward is what the user gave: that of a run folder does not count.
        given: a scorer that is an object, in place of the file that the configuration names.

    Raises:
        RequestError: no scorer was given, it cannot be loaded, or there are settings of a reward without one.
    """
    train = config.train
    if train.objective != REWARD:
        for key in ("max_new_tokens", "temperature"):
            if getattr(train, key) != getattr(TrainConfig, key):
                raise RequestError(
                    f"train.{key} is {getattr(train, key)}, which is for a reward; give train.reward too."
                )
        return None
    if given is not None:
        name = name_of(given)
        score, digest = given, hashlib.sha256(name.encode()).hexdigest()
    elif train.reward in (None, IN_MEMORY):
        raise RequestError(
            f"train.objective is {REWARD}, and no scorer is given, for what a run folder says of it does not count; "
            "give --reward FILE.py:FUNCTION, or reward=... in Python."
        )
    else:
        name = str(train.reward)
        score, digest = load_score(name)
    return Reward(score, name, digest, train.max_new_tokens, train.temperature, train.seed)


def with_reward(config: Config, reward: Score | str | None) -> tuple[Config, Score | None]:
    """(the configuration with this reward as its objective, the scorer where it is an object)."""
    if reward is None:
        return config, None
    named = reward if isinstance(reward, str) else IN_MEMORY
    train = replace(config.train, objective=REWARD, reward=named)
    return replace(config, train=train), None if isinstance(reward, str) else reward


def reward_notice(reward: Reward | None) -> list[str]:
    """What an evaluation of the reward takes."""
    if reward is None:
        return []
    return [
        f"train.reward: an evaluation of {reward.name} writes up to {reward.max_new_tokens} tokens for each row, each "
        "by a forward pass; num_forward_passes counts the evaluation as one."
    ]
