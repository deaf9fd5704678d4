"""Routes for operators: models, adapters, settings, health and what to scrape. The app may enter."""
