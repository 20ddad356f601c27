"""ModelPerfBackend and the fitting of cost models. Not built yet."""
