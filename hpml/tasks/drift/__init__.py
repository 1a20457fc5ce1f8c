"""How far requests and answers are from those of the validation split, where a model is served."""
