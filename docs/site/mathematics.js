/* Each formula's LaTeX, rendered in place. */
for (const element of document.querySelectorAll(".formula")) {
  const displayMode = element.classList.contains("displayed")
  katex.render(element.textContent, element, { displayMode, throwOnError: false })
}
