"""Draft training: data, features, objective, trainer."""
