"""The optimizers of the step benchmark by name, in optax."""

import optax

RATE = 1e-3
MOMENTUM = 0.9
DECAY = 0.01

OPTAX = {
    "sgd": optax.sgd(RATE, momentum=MOMENTUM),
    "adamw": optax.adamw(RATE, weight_decay=DECAY),
}
