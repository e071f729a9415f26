"""What the services and the operator's commands share; a user's service installs ``fairlane`` alone."""
