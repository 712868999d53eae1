"""How the small demo model is made: corpus, tokenizer, baseline, training loop, export.

Nothing here is needed to run a model. `loop.train_demo(settings.TrainDemo())` does the whole job.
"""
