"""The engine knows token ids and time; it knows neither text nor page."""
