//! Search for NVIDIA's shared libraries: in Python environments, toolkits and the system's folders.
//!
//! *In*: a place, or none. *Out*: the file of a library, or nothing. *Promise*: nothing is loaded.

use std::path::{Path, PathBuf};

/// Where NVIDIA's libraries usually are, most deliberate place first.
pub fn usual_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    places.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    if let Ok(here) = std::env::current_dir() {
        places.extend(here.ancestors().map(|folder| folder.join(".venv")).filter(|folder| folder.is_dir()));
    }
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        places.extend(std::env::var_os(variable).map(PathBuf::from));
    }
    places.extend(children(Path::new("/usr/local"), "cuda"));
    let user = std::env::var_os("HOME").map(|home| Path::new(&home).join(".local"));
    places.extend(["/usr/local", "/usr"].into_iter().map(PathBuf::from).chain(user));
    places
}

/// The library of that name that `place` holds (`libnvrtc.so`, with any version after it): `place`
/// itself where it is a file, or one in the folders where toolkits and Python packages put it.
pub fn library_in(place: &Path, name: &str) -> Option<PathBuf> {
    if place.is_file() {
        return Some(place.to_path_buf());
    }
    let mut folders = vec![place.to_path_buf(), place.join("lib64"), place.join("lib")];
    folders.extend(children(&place.join("targets"), "").into_iter().map(|target| target.join("lib")));
    for python in children(&place.join("lib"), "python3") {
        for packages in ["site-packages", "dist-packages"] {
            let nvidia = python.join(packages).join("nvidia");
            folders.extend(children(&nvidia, "").into_iter().map(|package| package.join("lib")));
        }
    }
    // Newest last in each folder; a name with a version is preferred because it is the name the
    // loader knows it by.
    folders.into_iter().find_map(|folder| children(&folder, name).pop())
}

/// The entries of `folder` whose name starts with `prefix`, sorted by name.
pub fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_into_environments_and_toolkits() {
        const NAME: &str = "libnvrtc.so";
        let root = std::env::temp_dir().join(format!("dreamc-search-{}", std::process::id()));
        let packages = root.join("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        let toolkit = root.join("cuda/targets/x86_64-linux/lib");
        for folder in [&packages, &toolkit] {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join("libnvrtc.so.13"), "").unwrap();
            std::fs::write(folder.join("libnvrtc-builtins.so.13.0"), "").unwrap();
        }
        assert_eq!(library_in(&root.join("venv"), NAME), Some(packages.join("libnvrtc.so.13")));
        assert_eq!(library_in(&root.join("cuda"), NAME), Some(toolkit.join("libnvrtc.so.13")));
        assert_eq!(library_in(&packages, NAME), Some(packages.join("libnvrtc.so.13")));
        assert_eq!(library_in(&packages.join("libnvrtc.so.13"), NAME), Some(packages.join("libnvrtc.so.13")));
        assert_eq!(library_in(&root, NAME), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
