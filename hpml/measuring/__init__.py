"""How engines are timed, and what follows: shared by the benchmark, `hpml bench` and the diagnosis."""
