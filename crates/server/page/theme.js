// Before anything is painted: the theme that was chosen, if it is not the system's.
try {
  const theme = JSON.parse(localStorage.getItem('paceline.theme'))
  if (theme) document.documentElement.dataset.theme = theme
} catch {
  // A private window may refuse; the system's theme holds.
}
