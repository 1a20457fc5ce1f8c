"""What chooses the order, the numbers and the place of the stages; the `hpml` command."""

import components as components  # first of all: it switches off what phones home
